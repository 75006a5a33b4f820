"""docs/legality.md, whose tables are written by hand, names the models that its rules concern."""

from pathlib import Path

from superpod.planner import models

PAGE = Path(__file__).parent.parent.parent / "docs" / "legality.md"
FAMILIES = {"llama4": "Llama 4", "deepseek": "DeepSeek"}


def test_the_row_of_delayed_scaling_names_every_model_with_shared_experts():
    [row] = [line for line in PAGE.read_text().splitlines() if line.startswith("|") and "(fp8ds)" in line]
    for name in models.names():
        if models.find(name).shared_ffn:
            assert FAMILIES.get(name.partition("_")[0], f"`{name}`") in row
