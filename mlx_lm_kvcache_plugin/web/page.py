"""The status page: one file with its style and script, and headers that let it do nothing else."""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

_INLINE = re.compile(rb"<(style|script)>(.*?)</\1>", re.DOTALL)


@cache
def body() -> bytes:
    """The page, as UTF-8."""
    return files(__package__).joinpath("page.html").read_bytes()


def headers() -> dict[str, str]:
    """What keeps a browser to what is in the page, and the page to its own server."""
    return {
        "Content-Security-Policy": _policy(),
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
    }


@cache
def _policy() -> str:
    """Inline text is known by its hash, so that the page and the policy cannot fall apart."""
    sources = {
        "default-src": "'none'",
        **{
            f"{tag.decode()}-src": f"'sha256-{_hash(text)}'"
            for tag, text in _INLINE.findall(body())
        },
        "connect-src": "'self'",
        "img-src": "data:",  # its icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in sources.items())


def _hash(text: bytes) -> str:
    return b64encode(sha256(text).digest()).decode("ascii")
