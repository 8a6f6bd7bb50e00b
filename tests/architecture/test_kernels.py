"""What Triton's interpreter does not tell on a machine without a GPU."""

from __future__ import annotations

import ast

from source_tree import files, functions, name_of

# Triton 3.6 builds a launcher with a parameter of this name; a kernel's own would be there twice.
_TAKEN = "options"


def test_no_kernel_has_a_parameter_that_its_launcher_has() -> None:
    found = [
        f"{name_of(path)}: {function.name}"
        for path in files()
        for function in functions(path)
        if any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)
        and any(argument.arg == _TAKEN for argument in function.args.args)
    ]
    assert not found
