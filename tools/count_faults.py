"""Run the tests that inject failures and print how many of each kind there were, as the table of docs/figures.md.

Tests that show that a broken copy of the code is found are left out: their failures would be counted twice.

Usage: count_faults.py [ARGUMENT...] where the arguments are further ones for pytest, as -k or -x
"""

import contextlib
import functools
import pathlib
import sys

import pytest

TESTS = pathlib.Path(__file__).resolve().parent.parent / "tests"
# One call of these functions of other tests is one failure.
COUNTED = {
    ("test_sessionfile_damage", "put"): "a damaged file is read",
    ("test_modelweights", "loaded_or_refused"): "a hostile or damaged model file",
}
FILES = [*sorted(TESTS.glob("test_faults*.py")), *(TESTS / f"{module}.py" for module, _ in COUNTED)]


class Counting:
    """A plugin that leaves out the broken copies and counts the failures of the other tests."""

    @staticmethod
    def pytest_collection_modifyitems(config, items):
        left_out = [item for item in items if item.path.name.startswith("test_faults") and "is_found" in item.name]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
        import given_faults

        for (module, name), kind in COUNTED.items():
            function = getattr(sys.modules[module], name)

            def counted(*arguments, function=function, kind=kind, **named):
                given_faults.count(kind)
                return function(*arguments, **named)

            setattr(sys.modules[module], name, functools.wraps(function)(counted))


def main(*arguments: str) -> int:
    with contextlib.redirect_stdout(sys.stderr):
        code = pytest.main([*map(str, FILES), *arguments], plugins=[Counting()])
    import given_faults

    print("| failure | injected |")
    print("| --- | ---: |")
    for kind, number in sorted(given_faults.INJECTED.items()):
        print(f"| {kind} | {number} |")
    print(f"| in all | {given_faults.INJECTED.total()} |")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
