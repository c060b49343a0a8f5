"""Who may ask, and who is shown text: no web page of others, and prompts only on this machine.

A browser sends requests for every page that it shows, to this machine too. Three headers, which no
page can forge, tell such a request from one of ours:

- `Host` is the name that the browser asked for. A site can let its own name lead here (DNS
  rebinding), but it stays its own: only a loopback or a name of this server is answered. A loopback
  may have any port, as `ssh -L` and containers listen on others and pass on; a name has the
  server's, or none. IP addresses are taken as written out, `localhost` without a dot at its end.
- `Origin` is the page's. It must be what `Host` says, over plain HTTP.
- `Sec-Fetch-Site` says the same of requests that carry no `Origin`, such as images. A link to the
  status page may be followed from anywhere: the page that has it learns nothing.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_address

from .messages import Request

PAGE = "/cache"
"""The path of the status page."""

_AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([0-9A-Za-z._-]+))(?::([1-9][0-9]{0,4}))?")
_DEFAULT_PORT = 80

_FORWARDS = {"forwarded", "via", "x-real-ip"}
_FORWARDS_PREFIX = "x-forwarded-"


def refusal(request: Request) -> tuple[int, str] | None:
    """Why a request is not answered, as a status and one line; None if it is."""
    if request.is_garbled:  # what a browser or a proxy has added may be among what is lost
        return 400, "a line among the headers is none"
    hosts = request.values("Host")
    if len(hosts) != 1 or not _is_ours(hosts[0], request):
        return 403, "the Host header names no address of this server; localhost is one"
    if not _is_same_origin(request, hosts[0]) or _is_cross_site(request):
        return 403, "web pages of other origins may not ask"
    return None


def shows_text(request: Request) -> bool:
    """Whether a request comes from this machine, and not through a proxy for somebody else."""
    names = {name.lower() for name, _ in request.headers.items()}
    is_forwarded = names & _FORWARDS or any(name.startswith(_FORWARDS_PREFIX) for name in names)
    return _is_loopback(request.peer) and not is_forwarded


def _is_ours(authority: str, request: Request) -> bool:
    """Whether `host[:port]` is this server; not if it is garbled."""
    match = _AUTHORITY.fullmatch(authority)
    if match is None:
        return False
    bracketed, name, digits = match.groups()
    port = int(digits or _DEFAULT_PORT)
    if port >= 1 << 16 or (bracketed and not _is_ipv6(bracketed)):
        return False
    host = _usual(bracketed or name)
    if host == "localhost" or _is_loopback(host):
        return True
    is_known = host in {_usual(known) for known in request.hosts}
    return is_known and port in {_DEFAULT_PORT, request.port}


def _is_ipv6(text: str) -> bool:
    return ":" in text and _address(text) is not None


def _usual(host: str) -> str:
    """A name in lower case, an address in its shortest form."""
    return str(_address(host) or host.lower())


def _address(text: str) -> IPv4Address | IPv6Address | None:
    """The IP address that a text is; of IPv4 also where it comes in the clothes of IPv6."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return address is not None and address.is_loopback


def _is_same_origin(request: Request, host: str) -> bool:
    """Whether the page that asks, if it is one, was got from where it asks."""
    origins = [_without_default_port(origin) for origin in request.values("Origin")]
    return origins in ([], [f"http://{_without_default_port(host)}"])


def _without_default_port(text: str) -> str:
    return text.lower().removesuffix(f":{_DEFAULT_PORT}")


def _is_cross_site(request: Request) -> bool:
    """Whether the browser says that another site's page asks, and not by a link to our page."""
    if set(request.values("Sec-Fetch-Site")) <= {"same-origin", "none"}:
        return False
    is_followed = request.values("Sec-Fetch-Mode") == ["navigate"]
    is_in_a_tab = request.values("Sec-Fetch-Dest") == ["document"]
    is_the_page = request.method == "GET" and request.path == PAGE
    return not (is_followed and is_in_a_tab and is_the_page)
