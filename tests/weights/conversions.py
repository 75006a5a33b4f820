"""conversions.py FOLDER: convert tiny models to NeMo and back; writes the results as JSON."""

import json
import sys
from pathlib import Path
from typing import Any


def main(folder: Path) -> None:
    from superpod.rehearsal import install

    install()
    from tests.weights import tiny

    answer: dict[str, object] = {kind: there_and_back(folder, kind) for kind in tiny.KINDS}
    answer["merging"] = {f"{kind} {name}": merging(folder, kind, name) for kind, name in MERGED}
    answer["custom"] = custom(folder)
    (folder / "answer.json").write_text(json.dumps(answer))


MERGED = (("llama", "LoRA"), ("llama", "DoRA"), ("qwen2", "LoRA"))


def merging(folder: Path, kind: str, name: str) -> dict[str, object]:
    """Random adapters on an imported model: what they change, and how far merged is from applied."""
    import torch
    from nemo.collections import llm

    from superpod.weights.transfer import load

    model = load.load_model(folder / f"{kind}-nemo", torch.float32)
    whole = load.unwrap_model(model)
    tokens, positions = torch.arange(2, 34)[None], torch.arange(32)[None]
    torch.manual_seed(1)
    with torch.no_grad():
        plain = whole(tokens, positions, None)
        getattr(llm.peft, name)(dim=4, alpha=8)(model)
        adapted: list[Any] = [module for module in whole.modules() if hasattr(module, "to_wrap")]
        for layer in adapted:
            for linear in (layer.adapter.linear_in, layer.adapter.linear_out):
                linear.weight.normal_(std=0.2)
            if name == "DoRA":
                layer.adapter.weight_magnitude.copy_(1.5 * layer.to_wrap.weight.norm(dim=1))
        applied = whole(tokens, positions, None)
        count = load.merge_adapters(model)
        for parameter, weight in whole.named_parameters():
            if "adapter.linear_out" in parameter:
                weight.zero_()
        state = load.get_base_state_dict(model)
        bare = load.unwrap_model(load.load_model(folder / f"{kind}-nemo", torch.float32))
        names = {parameter for parameter, _ in bare.named_parameters()}
        bare.load_state_dict({parameter: state[parameter] for parameter in names}, strict=False)
        merged = bare(tokens, positions, None)
    return {
        "count": count,
        "names": sorted(names - state.keys()),
        "effect": (applied - plain).abs().max().item(),
        "difference": (applied - merged).abs().max().item(),
    }


def there_and_back(folder: Path, kind: str) -> dict[str, object]:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from superpod.weights.transfer import conversion
    from tests.weights import tiny

    first = tiny.folder(folder / kind, kind)
    nemo, back = folder / f"{kind}-nemo", folder / f"{kind}-back"
    conversion.import_hf(first, nemo)
    conversion.export_hf(nemo, back)
    one, two = (load_file(path / "model.safetensors") for path in (first, back))
    loaded: Any = AutoModelForCausalLM.from_pretrained(back, output_loading_info=True)
    loading = loaded[1]
    words = AutoTokenizer.from_pretrained(back)("the quick brown fox")["input_ids"]
    return {
        "names": sorted(set(one) ^ set(two)),
        "different": [name for name in one if name in two and not torch.equal(one[name], two[name])],
        "types": sorted({str(tensor.dtype) for tensor in two.values()}),
        "matrices": len(one),
        "missing": loading["missing_keys"] + loading["unexpected_keys"],
        "config": json.loads((first / "config.json").read_text()) == json.loads((back / "config.json").read_text()),
        "words": words == AutoTokenizer.from_pretrained(first)("the quick brown fox")["input_ids"],
        "left": sorted(path.name for path in folder.glob(".*")),
    }


def custom(folder: Path) -> dict[str, object]:
    """A folder with code of its own there and back: what is said of it, and whether any of it was executed."""
    from superpod.common import custom_code
    from superpod.weights.serving import servable
    from superpod.weights.transfer import conversion
    from tests.weights import tiny

    first = tiny.folder(folder / "custom", "llama")
    nemo, back = folder / "custom-nemo", folder / "custom-back"
    tiny.customize(first, folder / "executed")
    record = conversion.import_hf(first, nemo)
    exported = conversion.export_hf(nemo, back)
    problems = [*servable.check_model(back).problems]
    (back / "config.json").write_text((first / "config.json").read_text())
    return {
        "imported": record["notes"],
        "kept": conversion.read_import_notes(nemo),
        "exported": exported["notes"],
        "left": [path.name for path in back.glob("*.py")],
        "named": custom_code.python_files(back).keys() - {"config.json"} != set(),
        "problems": problems,
        "dangling": [*servable.check_model(back).problems],
        "executed": (folder / "executed").exists(),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
