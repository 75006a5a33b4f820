"""Write collection/facts/override_fields.json: the fields that overrides can set, by section, from NeMo's classes.

    python scripts/override_fields.py

Run it after a change of the pinned NeMo; tests/collection/facts/test_override_fields.py compares the file with NeMo.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator

from superpod.collection.facts.override_fields import FILE


def read_fields() -> dict[str, list[str]]:
    """Return section -> names of the parameters of all classes that recipes use in it."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig
    from nemo import lightning as nl
    from nemo.collections.llm.bert.data.mock import BERTMockDataModule
    from nemo.collections.llm.gpt.data.fine_tuning import FineTuningDataModule
    from nemo.collections.llm.gpt.data.mock import MockDataModule
    from nemo.collections.llm.gpt.data.pre_training import PreTrainingDataModule
    from nemo.collections.llm.gpt.data.retrieval import CustomRetrievalDataModule
    from nemo.collections.llm.t5.data.mock import MockDataModule as T5MockDataModule
    from nemo.lightning.pytorch.strategies import FSDP2Strategy, FSDPStrategy
    from torch.nn.parallel import DistributedDataParallel

    from superpod.nemo2.overrides import parameters

    mock = [MockDataModule, T5MockDataModule, BERTMockDataModule]
    classes = {
        "trainer": [nl.Trainer],
        "trainer.strategy": [nl.MegatronStrategy, FSDPStrategy, FSDP2Strategy, DistributedDataParallel],
        "trainer.strategy.ddp": [DistributedDataParallelConfig],
        "optim": [nl.MegatronOptimizerModule],
        "optim.config": [OptimizerConfig],
        "log": [nl.NeMoLogger],
        "log.ckpt": [nl.ModelCheckpoint],
        "resume": [nl.AutoResume],
        "resume.restore_config": [nl.RestoreConfig],
        "model.config": list(_subclasses(TransformerConfig)),
        "data": [PreTrainingDataModule, FineTuningDataModule, CustomRetrievalDataModule, *mock],
    }
    return {at: sorted({name for one in group for name in parameters(one)}) for at, group in classes.items()}


def _subclasses(kind: type) -> Iterator[type]:
    """Yield a class and all its subclasses."""
    yield kind
    for derived in kind.__subclasses__():
        yield from _subclasses(derived)


def format_json(fields: dict[str, list[str]]) -> str:
    """Format the fields as JSON, with lines of up to 120 characters."""
    texts = {at: ", ".join(json.dumps(name) for name in names) for at, names in fields.items()}
    filled = {at: textwrap.fill(text, 120, initial_indent="  ", subsequent_indent="  ") for at, text in texts.items()}
    return "{\n" + ",\n".join(f" {json.dumps(at)}: [\n{text}\n ]" for at, text in filled.items()) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(format_json(read_fields()), encoding="utf-8")
