"""conversions.py FOLDER: tiny models to NeMo and back; says what came of it, as JSON."""

import json
import sys
from pathlib import Path
from typing import Any


def main(folder: Path) -> None:
    from superpod.launchers.rehearsal import install

    install()
    from tests.recipes.weights import tiny

    (folder / "answer.json").write_text(json.dumps({kind: there_and_back(folder, kind) for kind in tiny.KINDS}))


def there_and_back(folder: Path, kind: str) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from superpod.recipes.weights import huggingface
    from tests.recipes.weights import tiny

    first = tiny.folder(folder / kind, kind)
    nemo, back = folder / f"{kind}-nemo", folder / f"{kind}-back"
    huggingface.import_hf(first, nemo)
    huggingface.export_hf(nemo, back)
    one, two = (load_file(each / "model.safetensors") for each in (first, back))
    _, loading = AutoModelForCausalLM.from_pretrained(back, output_loading_info=True)
    words = AutoTokenizer.from_pretrained(back)("the quick brown fox")["input_ids"]
    return {
        "names": sorted(set(one) ^ set(two)),
        "different": [name for name in one if name in two and not torch.equal(one[name], two[name])],
        "types": sorted({str(each.dtype) for each in two.values()}),
        "matrices": len(one),
        "missing": loading["missing_keys"] + loading["unexpected_keys"],
        "config": json.loads((first / "config.json").read_text()) == json.loads((back / "config.json").read_text()),
        "words": words == AutoTokenizer.from_pretrained(first)("the quick brown fox")["input_ids"],
        "left": sorted(path.name for path in folder.glob(".*")),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
