"""adapter_cases.py FOLDER: put random adapters on tiny models, write them for PEFT; writes what PEFT computes as JSON.

One process for all, because importing NeMo takes long.
"""

import json
import sys
from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, object]] = {
    "llama": {},
    "phi3": {"num_key_value_heads": 4},
    "mixtral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "starcoder2": {},
    "nemotron": {},
    "gemma2": {"head_dim": 256, "query_pre_attn_scalar": 224, "hidden_activation": "gelu_pytorch_tanh"},
}
"""model_type -> sizes beside tiny.py's; NeMo's classes fix the heads of some."""
ATTENTION = ["linear_qkv", "linear_proj"]
ALL = [*ATTENTION, "linear_fc1", "linear_fc2"]


def main(folder: Path, *cases: str) -> None:
    """Every case is `KIND-CLASS`, such as mixtral-LoRA."""
    from superpod.rehearsal import install

    install()
    answer: dict[str, object] = {case: compared(folder, *case.split("-")) for case in cases}
    if "llama-LoRA" in answer:
        answer["fused"] = refused_where_peft_has_no_layer(folder)
    if "gemma2-LoRA" in answer:
        answer["behind norms"] = refused_behind_norms(folder)
    (folder / "answer.json").write_text(json.dumps(answer))


def imported(folder: Path, kind: str) -> tuple[Path, Path]:
    from superpod.weights.transfer import conversion
    from tests.weights import tiny

    first, nemo = folder / kind, folder / f"{kind}-nemo"
    if not nemo.exists():
        tiny.KINDS.setdefault(kind, {})
        tiny.folder(first, kind, **SIZES[kind])
        conversion.import_hf(first, nemo)
    return first, nemo


def adapted(nemo: Path, name: str, *, behind_norms: bool = False) -> Any:
    """The model with adapters of random numbers on all layers; DoRA's and Gemma 2's on those of their recipes."""
    import torch
    from nemo.collections import llm

    from superpod.weights.transfer import load

    model = load.load_model(nemo, torch.float32)
    experts = model.config.num_moe_experts
    targets = ATTENTION if name == "DoRA" and experts else ALL
    normed = any(hasattr(module, "post_layernorm") for module in load.unwrap_model(model).modules())
    if normed and not behind_norms:
        targets = ["linear_qkv", "linear_fc1"]
    getattr(llm.peft, name)(target_modules=targets, dim=4, alpha=8)(model)
    torch.manual_seed(3)
    with torch.no_grad():
        for layer in load.unwrap_model(model).modules():
            if hasattr(layer, "to_wrap"):
                own: Any = layer
                own.adapter.linear_in.weight.normal_(std=0.2)
                own.adapter.linear_out.weight.normal_(std=0.2)
                if name == "DoRA":
                    own.adapter.weight_magnitude.copy_(1.5 * own.to_wrap.weight.norm(dim=1))
    return model


def compared(folder: Path, kind: str, name: str) -> dict[str, object]:
    """How far PEFT's logits are from the merged model's, and how far the adapter moves them."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from superpod.weights.transfer import adapter_export, conversion, forward_check, load, transformers_model

    first, nemo = imported(folder, kind)
    model, out = adapted(nemo, name), folder / f"{kind}-{name}"
    count = adapter_export.write_adapter(model, first, str(first), out)
    trained = forward_check.run_megatron(load.unwrap_model(model), model.config)
    load.merge_adapters(model)
    merged: Any = conversion.fill_model(transformers_model.read_hf_config(first), model).eval()
    eager: Any = {"torch_dtype": torch.float32, "attn_implementation": "eager"}  # others leave out Gemma 2's soft caps
    plain: Any = AutoModelForCausalLM.from_pretrained(first, **eager).eval()
    tokens = torch.arange(2, 34)[None]
    with torch.no_grad():
        before = plain(tokens).logits
        peft: Any = PeftModel.from_pretrained(plain, out)
        after, theirs = peft(tokens).logits, merged(tokens).logits
        exported = merged(trained.tokens).logits[0]
    written = json.loads((out / "adapter_config.json").read_text())
    return {
        "count": count,
        "effect": (after - before).abs().max().item(),
        "difference": (after - theirs).abs().max().item(),
        "from_trained": (exported - trained.logits[:, : exported.shape[1]]).abs().max().item(),
        "base": written["base_model_name_or_path"] == str(first),
        "targets": sorted(written["target_modules"]),
        "files": sorted(path.name for path in out.iterdir()),
    }


def refused_where_peft_has_no_layer(folder: Path) -> str:
    """The refusal of a model whose matrix transformers holds in no linear layer, as it does gpt-oss's experts."""
    import torch

    from superpod.errors import UserError
    from superpod.weights.transfer import adapter_export, transformers_model

    first, nemo = imported(folder, "llama")
    with torch.device("meta"):
        target = transformers_model.build_uninitialized(transformers_model.read_hf_config(first))
    target.model.layers[1].mlp.down_proj = torch.nn.Module()
    try:
        adapter_export._locate_rows(adapted(nemo, "LoRA"), target)
    except UserError as error:
        return str(error)
    return ""


def refused_behind_norms(folder: Path) -> list[str]:
    """The refusals of an adapter that NeMo's Gemma 2 adds behind its norms: merged, and for PEFT."""
    from superpod.errors import UserError
    from superpod.weights.transfer import adapter_export, load

    first, nemo = imported(folder, "gemma2")
    model, refusals = adapted(nemo, "LoRA", behind_norms=True), list[str]()
    for write in (
        lambda: load.merge_adapters(model),
        lambda: adapter_export.write_adapter(model, first, "base", folder / "refused"),
    ):
        try:
            write()
        except UserError as error:
            refusals.append(str(error))
    return [*refusals, *(["written"] if (folder / "refused").exists() else [])]


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
