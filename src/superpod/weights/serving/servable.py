"""Checks without a GPU whether vLLM and TensorRT-LLM can load a Hugging Face folder.

Their supported architectures are listed in `served.toml`. The other checks apply to any server: config.json has
the required fields, every tensor has the name and shape that transformers expects, the data type is the one that
config.json specifies, and the embedding covers all ids of the tokenizer. Imports torch and transformers, never NeMo:
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

from superpod.common import custom_code, json_files

SERVERS_FILE = Path(__file__).with_name("served.toml")
NAMES = {"vllm": "vLLM", "tensorrt_llm": "TensorRT-LLM"}
FIELDS = ("architectures", "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")
"""Fields of config.json that every server reads; state-space models lack the last."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
TORCH_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""Data type in a safetensors header -> torch dtype."""
NO_DORA = "vLLM does not support DoRA; serve the merged model"
MAX_NAMES = 3
"""Maximum number of tensor names in a message."""

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name of a tensor -> data type and shape."""


@dataclass(frozen=True)
class Verdict:
    """Result of the checks. `problems` prevent a server from loading the folder, `notes` do not."""

    problems: tuple[str, ...]
    notes: tuple[str, ...]
    servers: tuple[str, ...]
    """Names of the servers that support the architecture."""

    @property
    def line(self) -> str:
        """The verdict as one line of text."""
        if self.problems:
            return f"not servable: {'; '.join(self.problems)}"
        verdict = (
            f"servable by {' and '.join(self.servers)}" if self.servers else "no listed server supports this model"
        )
        return f"{verdict}: {', '.join((*self.notes, 'no server was started'))}"


@cache
def load_tables() -> Mapping[str, Mapping[str, Any]]:
    """Return the tables of `served.toml` by server."""
    return tomllib.loads(SERVERS_FILE.read_text(encoding="utf-8"))


def check_model(folder: Path) -> Verdict:
    """Check whether servers can load the Hugging Face folder of a model (not of an adapter)."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        return Verdict((f"config.json cannot be read: {error}",), (), ())
    tensors = read_headers(folder)
    missing_keys = [name for name in FIELDS if not config.get(name) and name != "max_position_embeddings"]
    problems = [f"config.json lacks {', '.join(missing_keys)}"] if missing_keys else []
    if not missing_keys:
        problems += [*_check_shapes(folder, tensors), *_check_dtypes(config, tensors)]
    problems += _check_tokenizer(folder, config)
    if absent := custom_code.missing_files(folder):
        problems.append(f"custom code is missing: {', '.join(absent)}")
    architecture = (config.get("architectures") or [""])[0]
    known_tables = {key: table for key, table in load_tables().items() if architecture in table["architectures"]}
    notes = ["config, tensors and tokenizer match transformers"]
    notes += [f"{NAMES[key]} does not list {architecture}" for key in load_tables() if key not in known_tables]
    notes += custom_code.note(folder)
    notes += [] if (folder / "generation_config.json").is_file() else ["no generation_config.json"]
    notes += [] if has_template(folder) else ["no chat template"]
    servers = tuple(f"{NAMES[key]} ({table['commit']})" for key, table in known_tables.items())
    return Verdict(tuple(problems), tuple(notes), servers)


def check_adapter(folder: Path) -> Verdict:
    """Check whether vLLM can load the folder of a PEFT adapter."""
    config = json.loads((folder / "adapter_config.json").read_bytes())
    vllm = load_tables()["vllm"]
    fitting_ranks = [rank for rank in vllm["lora_ranks"] if rank >= config["r"]]
    problems = [] if vllm["dora"] or not config.get("use_dora") else [NO_DORA]
    problems += [] if fitting_ranks else [f"rank {config['r']} exceeds vLLM's maximum of {max(vllm['lora_ranks'])}"]
    over = bool(fitting_ranks) and config["r"] > vllm["lora_default"]
    notes = (f"--enable-lora --max-lora-rank {fitting_ranks[0]}" if over else "--enable-lora",) if fitting_ranks else ()
    return Verdict(tuple(problems), notes, (f"vLLM ({vllm['commit']})",))


def read_headers(folder: Path) -> Tensors:
    """Return the data type and shape of the tensors in a folder's safetensors files, by name."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        header.pop("__metadata__", None)
        tensors |= {name: (tensor["dtype"], tuple(tensor["shape"])) for name, tensor in header.items()}
    return tensors


def has_template(folder: Path) -> bool:
    """Return whether a folder's tokenizer has a chat template."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    return bool((json_files.read_json(folder / "tokenizer_config.json") or {}).get("chat_template"))


def _check_shapes(folder: Path, tensors: Tensors) -> Iterator[str]:
    """Yield the differences in names and shapes from the model that transformers builds for config.json."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(folder, trust_remote_code=False), trust_remote_code=False
            )
    except Exception as error:  # transformers raises many types for an invalid configuration
        yield f"transformers cannot build the model: {type(error).__name__}: {str(error)[:200]}"
        return
    model_shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tied_names = {*(getattr(model, "_tied_weights_keys", None) or ())} if model.config.tie_word_embeddings else set()
    missing_names = [name for name in model_shapes if name not in tensors and name not in tied_names]
    unknown = [name for name in tensors if name not in model_shapes]
    wrong_shapes = [
        f"{name} is {list(tensors[name][1])} instead of {list(shape)}"
        for name, shape in model_shapes.items()
        if name in tensors and tensors[name][1] != shape
    ]
    for title, names in (
        ("missing tensors", missing_names),
        ("unknown tensors", unknown),
        ("wrong shapes", wrong_shapes),
    ):
        if names:
            more_text = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
            yield f"{title}: {', '.join(names[:MAX_NAMES])}{more_text}"


def _check_dtypes(config: Mapping[str, Any], tensors: Tensors) -> Iterator[str]:
    """Yield a problem if no matrix has the dtype in config.json. Some matrices, such as routers, may be in FP32."""
    formats = {TORCH_DTYPES.get(dtype, dtype) for name, (dtype, shape) in tensors.items() if len(shape) > 1}
    declared_dtype = config.get("dtype") or config.get("torch_dtype") or ""
    if declared_dtype and formats and declared_dtype not in formats:
        yield f"config.json specifies {declared_dtype}, but the tensors are {', '.join(sorted(formats))}"


def _check_tokenizer(folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem if the tokenizer is missing or invalid, or its ids do not match config.json."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in TOKENIZERS):
        yield f"no tokenizer: none of {', '.join(TOKENIZERS)}"
        return
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types for a corrupt file
        yield f"the tokenizer cannot be loaded: {type(error).__name__}: {str(error)[:200]}"
        return
    highest = max(tokenizer.get_vocab().values(), default=0)
    if highest >= int(config.get("vocab_size") or 0):
        yield f"the tokenizer has id {highest}, but the embedding has only {config.get('vocab_size')} rows"
    ends = config.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    if tokenizer.eos_token_id is not None and ends != [None] and tokenizer.eos_token_id not in ends:
        yield f"eos_token_id is {ends} in config.json, but {tokenizer.eos_token_id} in the tokenizer"


def main(folder: str) -> None:
    """Print the verdict on the folder of a model or an adapter."""
    path = Path(folder)
    print((check_adapter if (path / "adapter_config.json").is_file() else check_model)(path).line)


if __name__ == "__main__":
    main(sys.argv[1])
