"""The loader of a patched module: upstream's own loader first, then our patch."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from . import apply


class PatchingLoader(Loader):
    """Stands for the original loader in a module's spec, and answers everything as that one does.

    It holds no state of its own, so a reload executes and patches the module again.
    """

    is_patching = True
    """Seen through the loaders that other hooks wrap around this one."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        if name == "_original":  # a copy is being made, and has nothing yet
            raise AttributeError(name)
        return getattr(self._original, name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._original!r}>"

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        create = getattr(self._original, "create_module", None)
        return create(spec) if create else None

    def exec_module(self, module: ModuleType) -> None:
        self._original.exec_module(module)
        apply(module)

    def get_code(self, fullname: str) -> CodeType | None:
        """The code that `python -m` is to run, for runpy, which never calls `exec_module`.

        Run twice, as `__main__` and again when something imports it, the module would be patched
        once only: so this code imports the real module and goes on with its `__main__` block.
        """
        try:
            return self._code_of_main(fullname)
        except Exception:  # runpy is to report what is wrong with a module, as it always does
            code: CodeType | None = self._original.get_code(fullname)
            return code

    def _code_of_main(self, fullname: str) -> CodeType:
        source = self._original.get_source(fullname)
        main = _main_blocks(ast.parse(source)) if source else []
        main = main or ast.parse('if __name__ == "__main__":\n    main()').body
        names = ast.parse(
            f"from {__name__} import names_of\n"
            f"globals().update(names_of({fullname!r}))\n"
            "del names_of"
        ).body
        for statement in names:  # a traceback is to point at the block, not at line 1
            ast.increment_lineno(statement, main[0].lineno - statement.lineno)
        code = ast.Module([*names, *main], type_ignores=[])
        # Our own `from __future__` must not hold for upstream's block.
        return compile(code, self._original.get_filename(fullname), "exec", dont_inherit=True)


def names_of(fullname: str) -> dict[str, Any]:
    """The names that a module defines, without those that every module has."""
    module = import_module(fullname)
    return {name: value for name, value in vars(module).items() if not _is_dunder(name)}


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _main_blocks(tree: ast.Module) -> list[ast.stmt]:
    """The `if __name__ == "__main__":` blocks at the top level of a module."""
    return [
        statement
        for statement in tree.body
        if isinstance(statement, ast.If) and _asks_for_main(statement.test)
    ]


def _asks_for_main(test: ast.expr) -> bool:
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq):
        return False
    sides = {ast.unparse(test.left), *map(ast.unparse, test.comparators)}
    return sides == {"__name__", "'__main__'"}
