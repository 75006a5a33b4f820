"""Checks without a GPU whether vLLM and TensorRT-LLM can load a Hugging Face folder.

The architectures that they support are listed in `served.toml`. The other checks hold for any server: the required
fields of config.json, every tensor with the name and shape that transformers gives it, one number format, a tokenizer
whose ids the embedding covers. Imports torch and transformers, never NeMo:
`python -m superpod.weights.serving.servable FOLDER` prints one line.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from superpod.common import custom_code

SERVED = Path(__file__).with_name("served.toml")
NAMES = {"vllm": "vLLM", "tensorrt_llm": "TensorRT-LLM"}
FIELDS = ("architectures", "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")
"""Of config.json, that every server reads; state-space models lack the last."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
FORMATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""Of a safetensors header -> torch's."""
MOST = 3
"""Names that a message lists."""

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> number format and shape."""


@dataclass(frozen=True)
class Verdict:
    """What was looked at, in words; `problems` keep a server from loading the folder."""

    problems: tuple[str, ...]
    notes: tuple[str, ...]
    servers: tuple[str, ...]
    """with a model for it"""

    @property
    def line(self) -> str:
        """The verdict in a line."""
        if self.problems:
            return f"not servable: {'; '.join(self.problems)}"
        where = f"servable by {' and '.join(self.servers)}" if self.servers else "no server in our lists has this model"
        return f"{where}: {', '.join((*self.notes, 'no server was started'))}"


@cache
def served() -> Mapping[str, Mapping[str, Any]]:
    """The servers' tables."""
    return tomllib.loads(SERVED.read_text(encoding="utf-8"))


def check(folder: Path) -> Verdict:
    """Look at a folder of a whole model."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        return Verdict((f"config.json cannot be read: {error}",), (), ())
    tensors = headers(folder)
    missing = [name for name in FIELDS if not config.get(name) and name != "max_position_embeddings"]
    problems = [f"config.json lacks {', '.join(missing)}"] if missing else []
    problems += [] if missing else [*_shapes(folder, tensors), *_formats(config, tensors)]
    problems += _tokenizer(folder, config)
    if absent := custom_code.missing(folder):
        problems.append(f"custom code is named and not there: {', '.join(absent)}")
    architecture = (config.get("architectures") or [""])[0]
    known = {key: table for key, table in served().items() if architecture in table["architectures"]}
    notes = ["config, tensors and tokenizer are as transformers has them"]
    notes += [f"{architecture} not in {NAMES[key]}'s list" for key in served() if key not in known]
    notes += custom_code.note(folder)
    notes += [] if (folder / "generation_config.json").is_file() else ["no generation_config.json"]
    notes += [] if has_template(folder) else ["no chat template"]
    servers = tuple(f"{NAMES[key]} ({table['commit']})" for key, table in known.items())
    return Verdict(tuple(problems), tuple(notes), servers)


def check_adapter(folder: Path) -> Verdict:
    """Look at a folder of PEFT's, for vLLM."""
    config = json.loads((folder / "adapter_config.json").read_bytes())
    vllm = served()["vllm"]
    fitting = [rank for rank in vllm["lora_ranks"] if rank >= config["r"]]
    problems = [] if vllm["dora"] or not config.get("use_dora") else ["vLLM has no DoRA: serve the merged folder"]
    problems += [] if fitting else [f"rank {config['r']} is more than vLLM's {max(vllm['lora_ranks'])}"]
    over = bool(fitting) and config["r"] > vllm["lora_default"]
    notes = (f"--enable-lora --max-lora-rank {fitting[0]}" if over else "--enable-lora",) if fitting else ()
    return Verdict(tuple(problems), notes, (f"vLLM ({vllm['commit']})",))


def headers(folder: Path) -> Tensors:
    """Every tensor of a folder's safetensors files, from their headers alone."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        header.pop("__metadata__", None)
        tensors |= {name: (tensor["dtype"], tuple(tensor["shape"])) for name, tensor in header.items()}
    return tensors


def has_template(folder: Path) -> bool:
    """Whether a folder's tokenizer has a chat template."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_bytes()).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def _shapes(folder: Path, tensors: Tensors) -> Iterator[str]:
    """Differences from transformers' own model of the configuration, which is built without memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(folder, trust_remote_code=False), trust_remote_code=False
            )
    except Exception as error:  # whatever a configuration may make transformers raise
        yield f"transformers cannot build the model: {type(error).__name__}: {str(error)[:200]}"
        return
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = {*(getattr(model, "_tied_weights_keys", None) or ())} if model.config.tie_word_embeddings else set()
    missing = [name for name in wanted if name not in tensors and name not in tied]
    unknown = [name for name in tensors if name not in wanted]
    shaped = [
        f"{name} {list(shape)}, not {list(tensors[name][1])}"
        for name, shape in wanted.items()
        if name in tensors and tensors[name][1] != shape
    ]
    for title, names in (("tensors missing", missing), ("unknown tensors", unknown), ("shapes", shaped)):
        if names:
            more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
            yield f"{title}: {', '.join(names[:MOST])}{more}"


def _formats(config: Mapping[str, Any], tensors: Tensors) -> Iterator[str]:
    """More than one number format, or another than config.json says; routers may be kept in 32 bits."""
    formats = {FORMATS.get(dtype, dtype) for name, (dtype, shape) in tensors.items() if len(shape) > 1}
    declared = config.get("dtype") or config.get("torch_dtype") or ""
    if declared and formats and declared not in formats:
        yield f"config.json says {declared}, and the tensors are {', '.join(sorted(formats))}"


def _tokenizer(folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """No tokenizer, none that can be loaded, or more ids than the embedding has rows."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in TOKENIZERS):
        yield f"no tokenizer: none of {', '.join(TOKENIZERS)}"
        return
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a damaged file may make transformers raise
        yield f"the tokenizer cannot be loaded: {type(error).__name__}: {str(error)[:200]}"
        return
    highest = max(tokenizer.get_vocab().values(), default=0)
    if highest >= int(config.get("vocab_size") or 0):
        yield f"the tokenizer has id {highest}, and the embedding {config.get('vocab_size')} rows"
    ends = config.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    if tokenizer.eos_token_id is not None and ends != [None] and tokenizer.eos_token_id not in ends:
        yield f"config.json's eos_token_id {ends} is not the tokenizer's {tokenizer.eos_token_id}"


def main(folder: str) -> None:
    """Print the verdict on a folder, of a model or of an adapter."""
    path = Path(folder)
    print((check_adapter if (path / "adapter_config.json").is_file() else check)(path).line)


if __name__ == "__main__":
    main(sys.argv[1])
