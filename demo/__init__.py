"""The demo: a real model, the stock server with the plugin's flags, and a table of what it saved.

Run it with `python -m demo` from the project's root, where the plugin is installed.
"""


class DemoError(Exception):
    """Something that the user can mend; its message is one line, plus a log's tail at most."""
