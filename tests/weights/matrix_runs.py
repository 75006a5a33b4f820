"""Make the folder of a case of the matrix, import and export it, and compare."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.weights import tiny
from tests.weights.matrix_cases import BASE, CASES, Case

EPSILONS = {"rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "norm_epsilon"}
"""Each model's own name for it. Large, so that a norm with an epsilon of its own moves the logits."""


def folder(out: Path, case: Case) -> Path:
    """The Hugging Face folder of a case."""
    import torch
    import transformers

    from superpod.data.tokens import tokenizer

    shutil.rmtree(out, ignore_errors=True)
    tokenizer.train(tiny.TEXTS * 4, 300, out)
    config = transformers.AutoConfig.for_model(case.kind, **{**BASE, **case.keys})
    if not hasattr(config, "kv_lora_rank"):  # where transformers has 1e-6 in the latent norms, and another is refused
        for key in EPSILONS & set(vars(config)) - set(case.keys):
            setattr(config, key, 1e-3)
    torch.manual_seed(1234)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.5 if "embed" in name else 0.25)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.add_(0.1 * torch.randn_like(buffer))
    model.to(getattr(torch, case.dtype)).save_pretrained(out)
    if case.change:
        case.change(out)
    if case.raw:
        path = out / "config.json"
        stated = json.loads(path.read_text()) | case.raw
        path.write_text(json.dumps({key: value for key, value in stated.items() if value is not None}))
    return out


def _spoilt(nearest: Any, case: Case) -> Any:
    return replace(nearest, fields=nearest.fields | case.spoilt)


def result(root: Path, name: str) -> dict[str, Any]:
    """Import and export a case; what came of it."""
    from superpod.errors import UserError
    from superpod.weights.families import export_config
    from superpod.weights.transfer import conversion

    case, key = CASES[name], str(sorted(CASES).index(name))
    first, nemo, back = (root / f"{key}{end}" for end in ("", "-nemo", "-back"))
    folder(first, case)
    checked = conversion.check_folder
    try:
        conversion.check_folder = lambda path: _spoilt(checked(path), case)
        record = conversion.import_hf(first, nemo, forward_check=case.checked)
        conversion.export_hf(nemo, back)
    except UserError as refused:
        left = sorted(path.name for path in root.iterdir() if path.name.startswith((f"{key}-", f".{key}-")))
        return {"refused": str(refused), "left": left}
    finally:
        conversion.check_folder = checked
    answer = {"record": record, "keys": same_keys(first, back), "nemo": difference(first, nemo, back)}
    if case.kind in export_config.MODEL_TYPES.values() or case.kind in ("qwen3_moe", "deepseek_v3"):
        shutil.rmtree(nemo / conversion.KEPT)  # as a model that was trained from scratch
        shutil.rmtree(back)
        conversion.export_hf(nemo, back, dtype=case.dtype)
        answer["own"] = same_keys(first, back)
    for path in (first, nemo, back):
        shutil.rmtree(path)
    return answer


def same_keys(first: Path, back: Path) -> list[str]:
    """Names of tensors that differ."""
    import torch
    from safetensors.torch import load_file

    files = list(first.glob("*.safetensors"))
    one: dict[str, Any] = {}
    for file in files:
        one |= load_file(file)
    if not files:
        one = torch.load(first / "pytorch_model.bin", weights_only=True)
    two = {name: tensor for file in back.glob("*.safetensors") for name, tensor in load_file(file).items()}
    one = {name: tensor for name, tensor in one.items() if "rotary_emb" not in name}
    packed = {name.removesuffix("_blocks") for name in one if name.endswith("_blocks")}
    one = {name: tensor for name, tensor in one.items() if not name.endswith(("_blocks", "_scales"))}
    two = {name: tensor for name, tensor in two.items() if name not in packed}  # `difference` compares their numbers
    if "lm_head.weight" not in two:
        one.pop("lm_head.weight", None)
    return sorted(one.keys() ^ two.keys()) + [
        n for n in one.keys() & two.keys() if not torch.equal(one[n].to(two[n].dtype), two[n])
    ]


def difference(first: Path, nemo: Path, back: Path) -> float:
    """Largest difference over the largest logit: NeMo's checkpoint and the exported folder, against the original."""
    import torch
    from transformers import AutoModelForCausalLM

    from superpod.weights.transfer import load, transformers_model

    tokens = torch.randint(2, 300, (1, 40), generator=torch.Generator().manual_seed(3))
    options: Any = {"torch_dtype": torch.float32, "attn_implementation": "eager"}
    theirs = transformers_model.load_reference(first)[0].float().eval()
    returned = AutoModelForCausalLM.from_pretrained(
        back, config=transformers_model.read_hf_config(back), **options
    ).eval()
    core = load.unwrap_model(load.load_model(nemo, torch.float32))
    with torch.no_grad():
        right = theirs(tokens, use_cache=False).logits
        ours = core(tokens, torch.arange(40)[None], None)[..., : right.shape[-1]]
        exported = returned(tokens, use_cache=False).logits
    return max((other - right).abs().max().item() for other in (ours, exported)) / right.abs().max().item()
