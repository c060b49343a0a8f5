"""Who may ask: which Host, Origin and Sec-Fetch-Site are let through, and who is shown text."""

from __future__ import annotations

import re
import socket

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlx_lm_kvcache_plugin.web import access
from tests.web.asking import LOCAL, PORT, request

Headers = dict[str, str] | list[tuple[str, str]]


def is_let_through(headers: Headers, target: str = "/v1/cache/stats", method: str = "GET") -> bool:
    refusal = access.refusal(request(target, method, headers))
    if refusal is not None:
        status, line = refusal
        assert status == 403
        assert line and line.isprintable()
    return refusal is None


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8080",
        "LocalHost:8080",
        "localhost:9999",
        "localhost:1",
        "localhost:65535",
        "127.0.0.1",
        "127.0.0.1:8080",
        "127.255.0.9:8080",
        "[::1]",
        "[::1]:8080",
        "[0:0::0:1]:8080",
        "[::ffff:127.0.0.1]:8080",
        "[::FFFF:7F00:1]:8080",
        "mac.local:8080",
        "MAC.local:8080",
        "mac.local",
        "mac.local:80",
        "192.168.1.5:8080",
        "[fd00::5]:8080",
        "[FD00:0::5]:8080",
        "10.0.0.7:8080",
        "[::ffff:10.0.0.7]:8080",
        "[::ffff:c0a8:105]:8080",
    ],
)
def test_names_of_this_server(host: str) -> None:
    """Loopback with any port, for tunnels; other names and addresses with the server's or none."""
    assert is_let_through({"Host": host})


@pytest.mark.parametrize(
    "host",
    [
        "",
        " ",
        ":8080",
        "evil.example",
        "evil.example:8080",
        "localhost.evil.example",
        "evil.localhost",
        "localhost.",
        "localhost.:8080",
        "mac.local.:8080",
        "mac.local:8081",
        "192.168.1.5:443",
        "192.168.1.6:8080",
        "[fd00::5]:8081",
        "[fd00::6]:8080",
        "0.0.0.0:8080",
        "[::]:8080",
        "128.0.0.1",
        "127.1",
        "127.0.0.01",
        "127.0.0.256",
        "127.0.0.1.",
        "127.0.0.1.evil.example",
        "0x7f.0.0.1",
        "2130706433",
        "::1",
        "::1:8080",
        "[::1",
        "::1]",
        "[]",
        "[localhost]",
        "[127.0.0.1]",
        "[mac.local]",
        "[::1%lo]",
        "[::1%25lo]:8080",
        "[::1]8080",
        "[::ffff:128.0.0.1]",
        "localhost:",
        "localhost:0",
        "localhost:08080",
        "localhost:65536",
        "localhost:99999999999999999999",
        "localhost:-1",
        "localhost:+80",
        "localhost:80 80",
        "localhost:８０",
        "localhost:http",
        "localhost:8080:8080",
        "localhost ",
        " localhost",
        "localhost\n",
        "localhost\r\n evil.example",
        "localhost\x00",
        "localhost/",
        "localhost,evil.example",
        "localhost@evil.example",
        "evil.example@localhost",
        "evil.example#localhost",
        "http://localhost",
        "ⓛocalhost",
        "localhoſt",
        "１２７.0.0.1",
    ],
)
def test_other_names(host: str) -> None:
    """A site that had its own name lead here, and whatever is not plainly a host and a port."""
    assert not is_let_through({"Host": host})


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Host", "localhost"), ("Host", "localhost")],
        [("Host", "localhost"), ("host", "evil.example")],
        [("Host", "evil.example"), ("Host", "localhost")],
        [("X-Forwarded-Host", "localhost")],
    ],
)
def test_the_host_is_named_once(headers: list[tuple[str, str]]) -> None:
    """Of two it is not known which one the browser meant."""
    assert not is_let_through(headers)


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:8080", "http://localhost:8080"),
        ("LOCALHOST:8080", "HTTP://localhost:8080"),
        ("localhost:9999", "http://localhost:9999"),
        ("localhost", "http://localhost"),
        ("localhost", "http://localhost:80"),
        ("localhost:80", "http://localhost"),
        ("[::1]:8080", "http://[::1]:8080"),
        ("[::ffff:7f00:1]:8080", "http://[::ffff:7f00:1]:8080"),
        ("mac.local:8080", "http://mac.local:8080"),
        ("192.168.1.5:8080", "http://192.168.1.5:8080"),
    ],
)
def test_the_own_origin(host: str, origin: str) -> None:
    """The status page asks from where it was got, a tunnel's port included."""
    assert is_let_through({"Host": host, "Origin": origin})


@pytest.mark.parametrize(
    "origin",
    [
        "",
        "null",
        "localhost:8080",
        "//localhost:8080",
        "https://localhost:8080",
        "file://localhost:8080",
        "http://localhost",
        "http://localhost:3000",
        "http://127.0.0.1:8080",
        "http://[::1]:8080",
        "http://mac.local:8080",
        "http://evil.example",
        "http://evil.example:8080",
        "http://localhost:8080.evil.example",
        "http://localhost:8080@evil.example",
        "http://user@localhost:8080",
        "http://localhost:8080/",
        "http://localhost:8080 http://evil.example",
        "http://localhost:8080\n",
        "http:// localhost:8080",
        "http://",
        "http://localhost:",
    ],
)
def test_other_origins(origin: str) -> None:
    """Also those of other ports and other names of this machine, whose pages are not ours."""
    assert not is_let_through({**LOCAL, "Origin": origin})


def test_two_origins_are_none() -> None:
    """Not even if each alone would do."""
    origin = ("Origin", "http://localhost:8080")
    assert is_let_through([*LOCAL.items(), origin])
    assert not is_let_through([*LOCAL.items(), origin, origin])


@pytest.mark.parametrize(
    ("sites", "is_let"),
    [
        ([], True),
        (["none"], True),
        (["same-origin"], True),
        (["same-site"], False),
        (["cross-site"], False),
        (["same-origin", "cross-site"], False),
        (["same-origin, none"], False),
        (["something new"], False),
        ([""], False),
    ],
)
@pytest.mark.parametrize("target", ["/v1/cache/stats", "/metrics", "/cache"])
def test_what_the_browser_says_of_the_page(target: str, sites: list[str], is_let: bool) -> None:
    """Only a page of this server, the address bar, or no browser at all."""
    headers = [*LOCAL.items(), *(("Sec-Fetch-Site", site) for site in sites)]
    assert is_let_through(headers, target) == is_let


FOLLOWED = {
    **LOCAL,
    "Sec-Fetch-Site": "cross-site",
    "Sec-Fetch-Mode": "navigate",
    "Sec-Fetch-Dest": "document",
}
"""The headers of a link that somebody followed on another site."""


@pytest.mark.parametrize("target", ["/cache", "/cache?from=docs"])
@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_link_to_the_page_can_be_followed(target: str, site: str) -> None:
    """From wherever it is."""
    assert is_let_through({**FOLLOWED, "Sec-Fetch-Site": site}, target)


@pytest.mark.parametrize(
    ("target", "method", "changes"),
    [
        ("/v1/cache/stats", "GET", {}),
        ("/metrics", "GET", {}),
        ("/cache/", "GET", {}),
        ("/cache", "POST", {}),
        ("/cache", "GET", {"Sec-Fetch-Mode": "no-cors"}),
        ("/cache", "GET", {"Sec-Fetch-Mode": "cors"}),
        ("/cache", "GET", {"Sec-Fetch-Dest": "iframe"}),
        ("/cache", "GET", {"Sec-Fetch-Dest": "image"}),
        ("/cache", "GET", {"Origin": "http://evil.example"}),
        ("/cache", "GET", {"Host": "evil.example"}),
    ],
)
def test_nothing_else_comes_in_by_a_link(target: str, method: str, changes: dict[str, str]) -> None:
    """No figures, no form, no frame, and no other name."""
    assert not is_let_through({**FOLLOWED, **changes}, target, method)


def numbers(first: int, last: int) -> st.SearchStrategy[str]:
    return st.integers(first, last).map(str)


PIECES = st.sampled_from(
    ["localhost", "127.0.0.1", "[::1]", "::1", "mac.local", "192.168.1.5", "[fd00::5]"]
    + ["evil.example", "127.", ".", ":", "@", "/", "[", "]", "%", "#", " ", "\t", "\n", ",", "K"]
    + ["8080", "80", "0", "http://", "https://", "null", "LOCALHOST", "\u3002", "\uff0e", "\u212a"]
)
NAMES = st.sampled_from(
    ["localhost", "Mac.Local", "10.0.0.7", "[::1]", "[fd00::5]", "[::ffff:10.0.0.7]", "evil.ex"]
)
LOOPBACKS = st.tuples(*[numbers(0, 260)] * 3).map(lambda rest: ".".join(("127", *rest)))
AUTHORITIES = st.builds(
    "".join,
    st.tuples(NAMES | LOOPBACKS, st.just("") | numbers(0, 70000).map(":{}".format))
    | st.tuples(NAMES, st.sampled_from(["", ":80", f":{PORT}"])),
)
TEXTS = AUTHORITIES | st.lists(PIECES, max_size=5).map("".join) | st.text(max_size=20)


OWN_NAMES = {"mac.local", "192.168.1.5", "10.0.0.7"}
OWN_IPV6 = {"fd00::5", "::ffff:10.0.0.7", "::ffff:192.168.1.5"}


def is_by_the_rule(host: str) -> bool:
    """The rule for hosts once more, by other means: of the C library and of counting colons."""
    name, colon, port = host.lower().rpartition(":") if host[-1:] != "]" else (host, "", "80")
    if not colon:
        name, port = host.lower(), "80"
    if not re.fullmatch("[0-9]+", port) or port[0] == "0" or int(port) > 65535:
        return False
    if not host.isascii():
        return False
    if name[:1] + name[-1:] == "[]":
        try:
            packed = socket.inet_pton(socket.AF_INET6, name[1:-1])
        except (OSError, ValueError):
            return False
        loopback = packed == bytes(15) + b"\x01" or packed[:13] == bytes(10) + b"\xff\xff\x7f"
        own = packed in {socket.inet_pton(socket.AF_INET6, known) for known in OWN_IPV6}
    else:
        octets = name.split(".")
        plain = len(octets) == 4 and all(re.fullmatch("0|[1-9][0-9]{0,2}", o) for o in octets)
        in_range = plain and octets[0] == "127" and all(int(octet) < 256 for octet in octets)
        loopback = name == "localhost" or in_range
        own = name in OWN_NAMES
    return loopback or (own and port in {"80", str(PORT)})


@given(TEXTS)
@example("[::ffff:127.0.0.1]:8080")
def test_no_host_outside_the_rule(host: str) -> None:
    """Whatever is sent as Host: it is let through if the rule says so, and only then."""
    assert is_let_through({"Host": host}) == is_by_the_rule(host)


@given(AUTHORITIES, TEXTS | TEXTS.map("http://{}".format) | st.just("null"))
def test_no_origin_outside_the_rule(host: str, origin: str) -> None:
    """Whatever is sent as Origin: only `http://` and the Host, whose port 80 may be left out."""
    if is_let_through({"Host": host, "Origin": origin}):
        own = f"http://{host.lower()}"
        assert origin.lower().removesuffix(":80") == own.removesuffix(":80")
        assert is_by_the_rule(host)


@given(AUTHORITIES)
def test_the_own_origin_is_let_through_wherever_the_host_is(host: str) -> None:
    """A name that may be asked for can have a page that asks."""
    assert is_let_through({"Host": host, "Origin": f"http://{host}"}) == is_by_the_rule(host)


@pytest.mark.parametrize(
    ("peer", "is_shown"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:192.168.1.5", False),
        ("192.168.1.5", False),
        ("10.0.0.1", False),
        ("0.0.0.0", False),
        ("::", False),
        ("fe80::1%en0", False),
        ("localhost", False),
        ("", False),
    ],
)
def test_text_is_shown_on_this_machine(peer: str, is_shown: bool) -> None:
    """By the address that a connection comes from, whatever its headers say."""
    assert access.shows_text(request(peer=peer)) == is_shown


@pytest.mark.parametrize(
    "name",
    [
        "X-Forwarded-For",
        "x-forwarded-for",
        "X-Forwarded-Host",
        "X-Forwarded-Proto",
        "Forwarded",
        "X-Real-IP",
        "Via",
    ],
)
@pytest.mark.parametrize("value", ["127.0.0.1", ""])
def test_a_proxy_speaks_for_others(name: str, value: str) -> None:
    """It may ask for figures; text is not shown, whoever it says it speaks for."""
    headers = {**LOCAL, name: value}
    assert not access.shows_text(request(headers=headers))
    assert is_let_through(headers)
