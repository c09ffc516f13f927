"""The notebook of examples/: its cells run in order, and the tide shows itself after a cell."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import torch

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell as a notebook does: statements, and the value of the last line if it is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)  # type: ignore[attr-defined]


def test_the_cells_train_and_show_the_tide() -> None:
    names: dict[str, Any] = {}
    cells = [
        "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]
    opened = [run_cell(source, names) for source in cells[:-2]][-1]
    assert "no step has ended yet" in opened._repr_html_()
    trained = run_cell(cells[-2], names)
    assert "20.0 MiB" in trained._repr_html_()
    assert trained._repr_html_().count("<rect") == 12, "a bar for each step, and one for its wait"
    told = run_cell(cells[-1], names)
    assert told["steps"] == 6
    assert 0 < told["peak_bytes"] <= told["budget_bytes"] == 20 << 20
    assert told["swapped_out_bytes"] > 0

    torch.manual_seed(0)
    stock = torch.nn.Sequential(*[each for _ in range(8) for each in (torch.nn.Linear(256, 256), torch.nn.GELU())])
    optimizer = torch.optim.AdamW(stock.parameters(), lr=1e-3)
    for number in range(6):
        stock(torch.randn(1024, 256, generator=torch.Generator().manual_seed(number))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in stock.state_dict().items():
        assert torch.equal(names["model"].state_dict()[name], value)
