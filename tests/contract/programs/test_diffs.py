"""The diffs in ``examples/ports`` fit the programs beside them: a formatter of one may forget the other."""

import ast

import pytest

from tests.contract.programs.test_programs import STYLES
from tests.support.programs import PORTS, forms_of


@pytest.mark.parametrize("port", [style.port for style in STYLES])
def test_diffs_apply(port):
    forms = forms_of(port)
    assert len(forms) == len(list(PORTS.glob(f"{port}.*"))) > 1
    for program in forms.values():
        ast.parse(program)
