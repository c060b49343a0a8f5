"""The build step that puts the start-up files at the root of site-packages.

`site` reads only what lies there, so they cannot be package data; `data_files` and a `build_py` of
our own both leave them out of editable installs. setup.cfg names the two classes under `cmdclass`.
setuptools runs this file by its path while it builds: nothing of the package may be imported here.
"""

from __future__ import annotations

import os

from setuptools import Command
from setuptools.command.build import build

FOLDER = os.path.join("mlx_lm_kvcache_plugin", "startup")
"""Relative to the project's root, which is the working directory of every build."""

STARTUP_FILES = ("mlx_lm_kvcache_plugin.pth", "mlx_lm_kvcache_plugin.start")


class BuildStartup(Command):
    """Copies the start-up files beside the package; implements setuptools' `SubCommand`."""

    description = "put the start-up files at the root of site-packages"
    user_options = [("build-lib=", "d", "directory to copy to")]

    editable_mode = False
    """Set by setuptools while it builds an editable wheel."""

    build_lib: str

    def initialize_options(self) -> None:
        self.build_lib = None  # type: ignore[assignment]

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        target = self._target()
        self.mkpath(target)
        for source in self._sources():
            self.copy_file(source, target)

    def _target(self) -> str:
        if not self.editable_mode:
            return self.build_lib
        # An editable wheel takes nothing from build_lib: its content is laid out in install_lib.
        folder = self.get_finalized_command("install").install_lib
        assert folder is not None
        return folder

    def get_source_files(self) -> list[str]:
        """What the sdist needs, this file included."""
        return [*self._sources(), os.path.join(FOLDER, "build.py")]

    def get_outputs(self) -> list[str]:
        return list(self.get_output_mapping())

    def get_output_mapping(self) -> dict[str, str]:
        return {
            os.path.join(self.build_lib, os.path.basename(path)): path for path in self._sources()
        }

    def _sources(self) -> list[str]:
        return [os.path.join(FOLDER, name) for name in STARTUP_FILES]


class Build(build):
    """The stock build, with `BuildStartup` as one more step."""

    sub_commands = [*build.sub_commands, ("build_startup", None)]
