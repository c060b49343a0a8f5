"""Exceptions of the plugin.

KVCachePluginError
├── SettingsError (a ValueError too)   a flag, variable or argument has a value of no use
├── PatchRefused                       upstream does not have the shape that a patch needs
├── PromptFileError                    a quantized prompt-cache file cannot be written or read
├── CodecError (a ValueError too)      a codec is unknown or was registered twice
└── LayerKindError (a ValueError too)  a layer kind is none or was registered twice
"""


class KVCachePluginError(Exception):
    """Base of all errors that the plugin raises on purpose."""


class SettingsError(KVCachePluginError, ValueError):
    """A flag, environment variable or argument has a value that cannot be used."""


class PatchRefused(KVCachePluginError):
    """Upstream does not look as expected, so nothing was changed; the message says what differs."""


class PromptFileError(KVCachePluginError):
    """A quantized prompt-cache file cannot be written or read."""


class CodecError(KVCachePluginError, ValueError):
    """A codec is unknown, or its name is already taken."""


class LayerKindError(KVCachePluginError, ValueError):
    """A class of cache objects cannot have this layer kind."""
