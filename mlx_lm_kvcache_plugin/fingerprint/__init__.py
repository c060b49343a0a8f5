"""A model's identity by content: the namespace of what is stored of it."""

from .walk import fingerprint

__all__ = ["fingerprint"]
