"""fields.py FILE: write fields of built recipes, with and without options, to FILE as JSON; imports NeMo once."""

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from superpod.errors import UserError

if TYPE_CHECKING:
    from nemo.collections.common.tokenizers import TokenizerSpec

LORA_8, LORA_16, LORA_32 = "llama3_8b_lora_h100_bf16", "llama3_70b_lora_h100_bf16", "mixtral_8x7b_lora_h100_bf16"
SFT = "llama3_8b_sft_h100_bf16"
USERBUFFERS = "llama3_70b_sft_h100_bf16"
"""Its layout has tensor parallelism, overlapped."""


def finetuned(name: str, nodes: int | None = None) -> dict[str, Any]:
    """Return the fields that fine-tuning sets, and the planner's values."""
    from superpod.collection.registry import find
    from superpod.nemo2.validation.configured_job import job, job_from_partial
    from superpod.recipes import build

    partial, recipe = build(name, nodes), find(name)
    planned = job_from_partial(partial, recipe)
    return {
        "strictness": partial.trainer.strategy.ckpt_load_strictness,
        "rank": getattr(getattr(partial, "peft", None), "dim", None),
        "alpha": getattr(getattr(partial, "peft", None), "alpha", None),
        "planned rank": planned.options.lora_rank,
        "as planned before": planned == job(recipe, nodes),
        "cp": partial.trainer.strategy.context_parallel_size,
        "per token": bool(partial.model.config.calculate_per_token_loss),
        "averages": bool(partial.trainer.strategy.ddp.average_in_collective),
        "steps": partial.trainer.max_steps,
        "interval": partial.trainer.val_check_interval,
        "batches": partial.trainer.limit_val_batches,
    }


def with_cp() -> str:
    """Return a fine-tuning recipe whose smallest size has context parallelism."""
    from superpod.collection.registry import recipes

    return next(r.name for r in recipes().values() if r.task == "sft" and r.gpu == "h100" and r.layout().cp > 1)


def optioned(name: str, options: str) -> dict[str, Any]:
    """Return the environment and the planned precision of a recipe with an option."""
    from superpod.collection.facts import environment
    from superpod.collection.registry import find
    from superpod.nemo2.validation.configured_job import job_from_partial
    from superpod.recipes import build

    try:
        partial = build(name, options=options)
    except UserError as refused:
        return {"refused": str(refused), "hint": refused.hint}
    planned = job_from_partial(partial, find(name))
    plugin, optimizer = partial.trainer.plugins, partial.optim.config
    return {
        "environment": {v.name: v.value for v in environment.variables(planned)},
        "precision": planned.precision,
        "userbuffers": [c.tp_comm_overlap for c in partial.trainer.callbacks if hasattr(c, "tp_comm_overlap")],
        "plugin": [plugin.precision, str(plugin.params_dtype), plugin.fp16_loss_scale],
        "optimizer": [bool(optimizer.fp16), bool(optimizer.bf16)],
    }


def batched(packed: bool, options: str = "") -> dict[str, Any]:
    """A batch of two short samples, written as `recipes finetune` does and read by NeMo's own dataset, under a recipe
    with userbuffers: its length, theirs (NeMo 2.7.3 megatron_comm_overlap.py, _init_te_userbuffers), and the rules."""
    from nemo.collections.llm.gpt.data.core import create_sft_dataset

    from superpod.data.samples import packing
    from superpod.data.samples.chat import Encoded
    from superpod.nemo2.validation import overlapping
    from superpod.nemo2.validation.reading import Reader
    from superpod.recipes import build
    from superpod.weights.finetuning import data_and_weights

    partial = build(USERBUFFERS, options=options)
    sizes = data_and_weights.compute_sizes(partial, packed)
    samples = [Encoded(line, [*range(5, 5 + length), 2], [True] * (length + 1)) for line, length in enumerate((30, 20))]
    with tempfile.TemporaryDirectory() as folder:
        data_and_weights.set_data(partial, Path(folder), sizes, Path(folder), 8, packed=packed)
        file, metadata = Path(folder, data_and_weights.TRAIN), Path(folder, data_and_weights.METADATA)
        bins = packing.pack(samples, sizes.size, sizes.multiple, 0) if packed else [[sample] for sample in samples]
        packing.write_bins(bins, file, multiple=sizes.multiple, filler=2)
        packing.write_metadata([bins], metadata)
        dataset = create_sft_dataset(
            file,
            cast("TokenizerSpec", SimpleNamespace(eos_id=2)),  # all that packed samples want of it
            sizes.size,
            pack_metadata_file_path=metadata,
            pad_cu_seqlens=bool(partial.data.packed_sequence_specs.pad_cu_seqlens),
            **partial.data.dataset_kwargs,
        )
        batches = [dataset.collate_fn([dataset[i]]) for i in range(len(bins))]
    callback = next(c for c in partial.trainer.callbacks if hasattr(c, "tp_comm_overlap"))
    broken = [b.rule for rule in overlapping.RULES for b in rule(Reader(partial))]
    partial.data.dataset_kwargs = {}
    return {
        "lengths": [batch["tokens"].shape[1] for batch in batches],
        "boundaries": [batch["cu_seqlens"].shape[1] for batch in batches],
        "userbuffers": partial.model.config.seq_length * partial.data.micro_batch_size
        if callback.tp_comm_overlap
        else 0,
        "broken": broken,
        "broken unpadded": [b.rule for rule in overlapping.RULES for b in rule(Reader(partial))],
    }


def tables() -> dict[str, str | None]:
    """Return the userbuffer configuration of each GPU's recipe for a shape that NeMo has tuned."""
    from superpod.nemo2.build import overlap
    from superpod.planner import hardware
    from superpod.planner.layout import Layout

    partial: Any = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(hidden_size=12288)))
    layout, tables = Layout(tp=4, sp=True, gbs=8), {}
    for gpu in hardware.builtin().gpus:
        recipe: Any = SimpleNamespace(gpu=gpu, precision="bf16", seq=2048)
        tables[gpu] = overlap._find_userbuffer_config(partial, layout, recipe)
    return {gpu: None if table is None else repr(table) for gpu, table in tables.items()}


def graphs_by_override() -> list[bool]:
    """Return whether the planner detects CUDA graphs by each field that enables them."""
    from superpod.collection.registry import find
    from superpod.nemo2 import overrides
    from superpod.nemo2.validation.configured_job import job_from_partial
    from superpod.recipes import build

    seen = []
    for text in ("enable_cuda_graph=True", "external_cuda_graph=True", "cuda_graph_impl=local", "cuda_graph_impl=none"):
        partial = build(LORA_8)
        overrides.apply(partial, [f"model.config.{text}"])
        seen.append(job_from_partial(partial, find(LORA_8)).options.cuda_graphs)
    return seen


def main(out: str) -> None:
    """Write all answers."""
    tp = "llama3_70b_pretrain_a100_bf16"
    answers = {
        "finetuned": {name: finetuned(name) for name in (LORA_8, LORA_16, LORA_32, SFT)} | {"cp": finetuned(with_cp())},
        "options": {text: optioned(tp, text) for text in ("", "cuda_graphs", "deterministic", "fp16", "fsdp")},
        "graphed": optioned(LORA_8, "cuda_graphs"),
        "tables": tables(),
        "graphs by override": graphs_by_override(),
        "packed": batched(packed=True),
        "graphs": batched(packed=True, options="cuda_graphs"),
        "unpacked": batched(packed=False),
        "fp8": optioned("llama3_8b_pretrain_h100_fp8cs", "fp16"),
    }
    Path(out).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
