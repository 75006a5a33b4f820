"""Causes: checkpoints, weights, tokenizers and data."""

from __future__ import annotations

from superpod.diagnosis.causes.table import HINT, LIKELY, PROGRAM, Cause, Pattern, phrases

CAUSES = (
    Cause(
        "checkpoint_damaged",
        PROGRAM,
        "a checkpoint is incomplete or corrupt: its save was interrupted, or files were lost later",
        "`recipes ckpt verify RUN` lists the damaged files; a resumed run uses the newest intact checkpoint",
        (
            *phrases("pytorchstreamreader failed", "invalid header or archive is corrupted", "incompletemetadata"),
            *phrases("pickle data was truncated", "is not a distributed checkpoint", "shardedobject are missing"),
            *phrases("storage has wrong byte size"),
            *phrases("failed finding central directory", "ran out of input", "not a zip file", sure=LIKELY),
            *phrases("missing shard", "unable to load weights from", sure=LIKELY),
            Pattern("safetensorerror", r"(incomplete|header|invalid|too (large|small)|metadata)"),
            Pattern("eoferror", r"(unpickler|serialization|pickle)\.py", LIKELY),
            Pattern("unexpected end of", r"(file|data|archive|stream)|EOF", LIKELY),
            Pattern("unpicklingerror", r"(?!.*[Ww]eights.only)", LIKELY),
            Pattern(
                "checkpoint",
                r"(checkpoint|metadata|shard)\b.*\b(is |are )?(corrupt(ed)?|damaged|incomplete|truncated|not whole"
                r"|unfinished)",
            ),
            Pattern("none of its", r"checkpoints? (is|are) (intact|whole)"),
            Pattern("checkpointingexception", r"(could not be loaded|not found|missing)", LIKELY),
            Pattern(".distcp", r"No such file|not found|Errno 2"),
            Pattern(".metadata", r"No such file|not found|Errno 2|EOF"),
            Pattern("metadata.json", r"(No such file|not found|Errno 2)", LIKELY),
            Pattern(
                "checksum",
                r"(mismatch|fail|does not match).*(checkpoint|file|shard)|(checkpoint|file|shard).*checksum",
                LIKELY,
            ),
            Pattern("cannot find", r"cannot find \S+\.(bin|safetensors|pt|distcp)\b", LIKELY),
            Pattern("unexpected eof", r"expected \d+ more bytes|corrupt"),
        ),
        follows=("disk_full", "quota", "filesystem_error"),
    ),
    Cause(
        "checkpoint_other_layout",
        PROGRAM,
        "the checkpoint was saved with a different TP, PP, EP or DP, in a format that cannot be resharded",
        "resume with the layout of the checkpoint (`recipes ckpt list RUN`); to change TP or PP between attempts, save "
        "with trainer.strategy.ckpt_optim_fully_reshardable=True",
        (
            # Optimizer states of experts are stored in a shape that depends on TP and EP.
            Pattern("global shape mismatch", r"\bkey optimizer\.", LIKELY),
            *phrases("from model not in state dict", "invalid access pattern", sure=LIKELY),
            *phrases("flattened ranges dont cover", sure=LIKELY),
            Pattern("optimizer.", r"(KeyError|not in|Missing key).*optimizer\.(distributed|state)", LIKELY),
            Pattern(
                "parallel_size", r"(value )?(from|of|in) (the )?checkpoint.*(is )?(not equal|!=|differ|does not match)"
            ),
            Pattern("parallel size", r"checkpoint.*(mismatch|differ|not equal|does not match)|mismatch.*checkpoint"),
            Pattern(
                "checkpoint",
                r"checkpoint (was |is )?(saved|trained|written|created)\b.*\b(tp|pp|ep|tensor|pipeline|layout"
                r"|world.?size|ranks).*(but|and|while|not)",
            ),
            Pattern(
                "world size",
                r"checkpoint.*world.?size.*(differ|mismatch|not equal|does not match|but)|different world size",
                sure=LIKELY,
            ),
            Pattern("checkpoint", r"checkpoint for \w+ ?= ?\d+ but", LIKELY),
            Pattern("(tp, pp)", r"mismatch"),
            *phrases("of another tp or pp", "cannot be loaded under"),
            Pattern("zero checkpoint", r"world.?size|dp", sure=LIKELY),
            Pattern("dp world size", r"automatic adjustment of ZeRO|cannot|not support", sure=LIKELY),
            Pattern("mp_rank_", r"(No such file|not found|Errno 2)", sure=LIKELY),
            Pattern("expected_shape", r"does not match|mismatch", LIKELY),
        ),
    ),
    Cause(
        "checkpoint_other_model",
        PROGRAM,
        "the checkpoint belongs to a different model",
        "compare `recipes ckpt list RUN` and `recipes show NAME`; fine-tuning must start from a model of the "
        "same size, and an adapter must be loaded with its base model",
        (
            *phrases("size mismatch for", "error(s) in loading state_dict", sure=LIKELY),
            *phrases("doesn't match the size of optimizer's group", sure=LIKELY),
            # The global shape of a weight does not depend on the layout, except for padding to a multiple of TP.
            Pattern("global shape mismatch", r"mismatch(?!.*\bkey optimizer\.)", LIKELY),
            *phrases("missing key in checkpoint state_dict", "size mismatch between saved"),
            Pattern("not found in checkpoint", r"\bkeys?\b|parameter|tensor", LIKELY),
            Pattern("keyerror", sure=LIKELY, frame=r"(dist_checkpointing|distributed/checkpoint)/"),
            Pattern("checkpoint", r"value from checkpoint \(.*\) is not equal to the input argument value"),
            Pattern("argument value", r"value from checkpoint"),
            *phrases("unexpected key", "missing key", pattern=r"(checkpoint|state.?dict)", sure=LIKELY),
            Pattern("you are trying to load a checkpoint", r"(type|model)", LIKELY),
            Pattern("model type", r"checkpoint.*(type|architecture).*(not (match|supported|recognize)|differ)", LIKELY),
        ),
        follows=("checkpoint_other_layout", "checkpoint_damaged", "vocabulary_mismatch"),
        topics=r"\b(checkpoint|ckpt|state[_ ]dict)\b|\b(missing|unexpected|incompatible) keys?\b"
        r"|(load|convert)_\w*(state_dict|checkpoint)|torch/serialization\.py load",
    ),
    Cause(
        "checkpoint_missing",
        PROGRAM,
        "the checkpoint or weights that the run starts from do not exist",
        "`recipes ckpt list RUN` lists the checkpoints; the path must be on a disk that every node can access; import "
        "the model first (`recipes ckpt convert`)",
        (
            Pattern(
                "checkpoint",
                r"(could not|cannot|can't|unable to|failed to) (find|locate) (any |a |the )?(\w+ )?checkpoint",
            ),
            Pattern(
                "checkpoint",
                r"^(?!.*Parent directory).*checkpoint\S* "
                r"(directory |file |path |at \S+ )?\S* ?(does not|doesn't) exist",
            ),
            Pattern(
                "no checkpoint",
                r"no (valid |whole |distributed )?checkpoints? (was |were )?(found|exists?|available)",
                LIKELY,
            ),
            Pattern("latest_checkpointed_iteration.txt", r"(could not|cannot|unable|No such|not found|missing)"),
            Pattern("exiting because", r"exit-on-missing-checkpoint|missing checkpoint", LIKELY),
            Pattern("must be an existing", r"checkpoint", LIKELY),
            *phrases("should have a `model_type` key", "hfvalidationerror", sure=LIKELY),
            Pattern("no file named", r"(pytorch_model|model\.safetensors|\.bin)"),
            Pattern("not found", r"checkpoint \S+ (was )?not found|restore\S* path .* not found"),
            Pattern("does not appear to have a file named"),
            Pattern("not a valid", r"not a valid (\w+ )?checkpoint"),
            Pattern("no such file", r"No such file.*\b(checkpoints?|ckpts?)\b", LIKELY),
            Pattern("model.safetensors.index.json", r"No such file|not found"),
        ),
        follows=("no_network", "missing_token"),
    ),
    Cause(
        "checkpoint_unsafe",
        PROGRAM,
        "torch.load accepts only weights, but the file contains other objects",
        "if you trust the file, load it with torch.load(..., weights_only=False), or allow its classes with "
        "torch.serialization.add_safe_globals, as newer versions of the library that wrote it may do",
        (
            *phrases("weights only load failed", "weightsunpickler error"),
            Pattern("weights_only", r"(Unsupported global|WeightsUnpickler|add_safe_globals|`weights_only`)"),
            Pattern("types accepted by default with weights_only", sure=LIKELY, any_level=True),
            Pattern("weights_only", r"default value of the `?weights_only|re-running `?torch\.load`? with", LIKELY),
            Pattern("unpicklingerror", sure=LIKELY, frame=r"_weights_only_unpickler"),
        ),
    ),
    Cause(
        "checkpoint_save",
        PROGRAM,
        "a checkpoint could not be saved",
        "read the lines near this message; check disk, quota and host memory first; "
        "with trainer.strategy.ckpt_async_save=False, the error is raised where it occurs",
        (
            Pattern("worker failure", r"(write|writing|checkpoint|proc)", LIKELY),
            Pattern("local process", r"encountered an error", LIKELY),
            Pattern(
                "checkpoint",
                r"(fail|error|unable|could not|cannot)\w*.*\b(sav(e|ing)|writ(e|ing)|finaliz\w+)\b.*checkpoint",
                LIKELY,
            ),
            Pattern("async", r"(asynchronous|async)\w* (checkpoint|save).*(fail|error|died|exit)", LIKELY),
            *phrases("pytorchstreamwriter failed", "open file failed because of", "iostream error", sure=LIKELY),
            Pattern("parent directory", r"Parent directory .* does not exist", LIKELY),
            Pattern("cannot be opened", r"File .* cannot be opened", LIKELY),
            Pattern("inline_container.cc", r"(unexpected pos|write)", LIKELY),
            Pattern("error while serializing"),
            Pattern("asynccallsqueue", r"error|fail", LIKELY),
        ),
        follows=(
            "disk_full",
            "quota",
            "host_out_of_memory",
            "shared_memory_full",
            "permission",
            "read_only",
            "rank_killed",
        ),
        topics=r"save_(checkpoint|model|pretrained|state_dict)|torch/serialization\.py _?save",
    ),
    Cause(
        "vocabulary_mismatch",
        PROGRAM,
        "the vocabulary of the data, tokenizer or checkpoint does not match the embedding of the model",
        "prepare the data again with the tokenizer of the model (dataset.json names the tokenizer of the data), or "
        "build the model with the vocabulary of the data",
        (
            *phrases("index out of range in self", "srcindex < srcselectdimsize", sure=LIKELY),
            Pattern("index out of bounds", r"(Indexing|ScatterGather|vectorized_gather)", LIKELY),
            *phrases("t >= 0 && t < n_classes", "cur_target >= 0 && cur_target < n_classes"),
            Pattern(
                "vocab",
                r"vocab\w*([ _-]?size)?\b.*(mismatch|not equal|does not match|differs?|smaller than|larger than"
                r"|not match|!=|exceeds?|disagree)",
            ),
            Pattern("vocab", r"(mismatch|does not match|differs?|exceeds?|outside|beyond|larger than)\b.*vocab"),
            Pattern(
                "token",
                r"token(s| ids?| id \d+)?\b.*(out of (range|vocab|bounds)|exceed|beyond|outside|greater than|>=).*",
            ),
            Pattern("word_embeddings.weight", r"(size mismatch|shape mismatch|mismatch)", LIKELY),
            Pattern("embed_tokens.weight", r"(size mismatch|shape mismatch|mismatch)", LIKELY),
            Pattern("output_layer.weight", r"(Global shape mismatch|size mismatch)", LIKELY),
            Pattern("lm_head.weight", r"size mismatch", LIKELY),
            Pattern(
                "tokenizer",
                r"tokenizer\b.*(vocab\w*)?.*(mismatch|does not match|differs? from|not the (same|one)|is not the)",
                LIKELY,
            ),
            Pattern("padded_vocab_size", r"(not equal|mismatch|differ|checkpoint)"),
            Pattern("target", r"Target -?\d+ is out of bounds"),
        ),
        message_topics=r"\bvocab\w*",
    ),
    Cause(
        "tokenizer_missing",
        PROGRAM,
        "the tokenizer cannot be loaded",
        "specify a folder or file that every node can access, and install the library that the tokenizer needs "
        "(sentencepiece, tiktoken, protobuf); without internet access, a tokenizer of the Hub must be in HF_HOME",
        (
            *phrases("can't load tokenizer for", "couldn't instantiate the backend tokenizer"),
            *phrases("unable to load vocabulary", "data did not match any variant of untagged enum"),
            *phrases("chat_template is not set"),
            Pattern("tokenizer.model", r"(No such file|Not found|does not exist|not a file|cannot be (found|opened))"),
            Pattern("sentencepiece", r"(ParseFromArray|Not found|Error #2|not installed|LoadFromFile|InternalError)"),
            Pattern(
                "tokenizer",
                r"(could not|cannot|can't|unable to|failed to) (be )?(load|find|instantiate|open|import).*tokenizer",
                LIKELY,
            ),
            Pattern(
                "tokenizer",
                r"tokenizer\S* (path |file |model )?\S* ?(is invalid|not found|does not exist|missing)",
                LIKELY,
            ),
            Pattern("tokenizer class", r"does not exist or is not currently imported"),
            *phrases("vocab file", "merges file", pattern=r"(not found|does not exist|No such)"),
            Pattern("no chat template", r"tokenizer|chat_template", LIKELY),
        ),
        follows=("missing_token", "no_network", "missing_package"),
        topics=r"tokeniz(er|ation_\w+\.py)",
    ),
    Cause(
        "data_missing",
        PROGRAM,
        "the data does not exist at the specified path",
        "specify the prefix without .bin or .idx, on a disk that every node can access and that container.mounts"
        " includes; dataset.json lists the prefixes",
        (
            Pattern(".idx", r"(No such file|cannot be found|not found|does not exist|Errno 2)"),
            Pattern(".bin", r"(\.idx and \.bin|cannot be found at the path prefix|indexed).*"),
            Pattern(
                "data",
                r"(dataset|data (folder|path|prefix|file)|training data)\b.*(not found|does not exist"
                r"|cannot be found|no such)",
                LIKELY,
            ),
            Pattern("dataset", r"\b(undefined|unknown|undeclared|no such) dataset\b", LIKELY),
            Pattern(
                "data",
                r"\b\w*data\w*/\S*\.(json|csv|tsv|txt|arrow|npy|h5|hdf5|zip|tar)\b.*(not found|does not exist)"
                r"|(No such file|Errno 2).*\b\w*data\w*/\S*\.(json|csv|tsv|txt|arrow|npy|h5|hdf5|zip|tar)\b",
                LIKELY,
            ),
            *phrases(".jsonl", ".parquet", pattern=r"(No such file|not found|does not exist|Errno 2)"),
            *phrases("couldn't find any data file", "datasetnotfounderror"),
            Pattern("couldn't find a dataset script", sure=LIKELY),
        ),
        follows=("no_network", "missing_token", "filesystem_error"),
    ),
    Cause(
        "data_damaged",
        PROGRAM,
        "a data file is not in the expected format",
        "check the file in the message; `recipes data build` writes it again, and reports rows that it cannot read",
        (
            Pattern("bad header", r"cannot read|idx|index|indexed"),
            Pattern("index file", r"(does ?n[o']t|not) match (the )?expected format", LIKELY),
            *phrases("indexheader", "jsondecodeerror", "unicodedecodeerror", "datasetgenerationerror", sure=LIKELY),
            Pattern(
                "json",
                r"(Expecting (value|property name|',' delimiter|':' delimiter)|Unterminated string|Extra data"
                r"|invalid json|JSON parse error)",
                LIKELY,
            ),
            *phrases("arrowinvalid", "nonmatchingsplitssizeserror", "unidentifiedimageerror"),
            *phrases("parquet magic bytes not found", "mmap length is greater than file size"),
            *phrases("buffer is smaller than requested size", "error -3 while decompressing"),
            Pattern("gzip", r"(Not a gzipped file|CRC check failed)"),
            Pattern("cannot reshape array of size", sure=HINT),
            Pattern("unsupported code", r"dtype"),
        ),
        follows=("data_missing", "disk_full", "quota"),
        topics=r"data_?sets?(?![a-z])|\bcolumns?\b|\bjsonl\b|torch/utils/data/|data_?loader|\bpyarrow\b|\bBuilderConfig\b"
        r"|\b(tar|zip|image) ?file\b|\b(LZMA|tarfile)\w*",
    ),
    Cause(
        "data_exhausted",
        PROGRAM,
        "the data is shorter than the run, or one of its splits is empty",
        "train for fewer steps or more epochs (num_epochs), or change the split; dataset.json contains the number "
        "of tokens",
        (
            *phrases("stopiteration", "no samples", "out of bounds for size 0", "no training would occur", sure=LIKELY),
            Pattern("not enough", r"not enough (samples|data|documents|tokens|sequences)"),
            Pattern(
                "samples",
                r"(num_samples|number of samples|dataset)\b.*(should be a positive|must be (positive|> ?0)|is (0"
                r"|zero|empty)|less than|fewer)",
                LIKELY,
            ),
            Pattern("num_samples", r"should be a positive integer value, but got num_samples=0"),
            Pattern("empty", r"(dataset|split|dataloader|blend) \S* ?(is|was) empty|empty (dataset|split)", LIKELY),
            *phrases("could not sample from the dataset", "no sample to consume"),
            Pattern("requested", r"requested .* samples? .*(only|but).*(available|has|contains)", LIKELY),
            Pattern("oversampl", r"(must|should|cannot)", LIKELY),
            Pattern("consumed all", r"samples|data", LIKELY),
            Pattern("total number of samples", r"consumed", LIKELY),
        ),
    ),
    Cause(
        "data_index_cache",
        PROGRAM,
        "the data index of one rank is not visible to the others, or two ranks built it at the same time",
        "set path_to_cache to a disk that every node can access, or build the index in advance with one "
        "process; delete an incomplete index",
        (
            Pattern("path_to_cache", r"(not|missing|fail|error)", LIKELY),
            Pattern(
                "index",
                r"(document|sample|shuffle)_?index\.npy.*(No such|not found|Errno 2|cannot)|Errno 2.*(document"
                r"|sample|shuffle)_index\.npy",
            ),
            Pattern(
                ".npy",
                r"(No such file|Errno 2).*(cache|index|indices|GPTDataset)|(cache|index|indices"
                r"|GPTDataset).*(No such file|Errno 2)",
            ),
            Pattern("cannot build", r"(index|helpers)", LIKELY),
            Pattern("helpers_cpp", r"(No module|cannot import|undefined|not found|failed|error)", LIKELY),
            Pattern("compile_helpers", r"(fail|error)", LIKELY),
            Pattern("dataset helper", r"fail", any_level=True),
            *phrases("no data left in file", "reused local directory", sure=LIKELY),
            Pattern("failed to interpret file", r"npy|pickle", LIKELY),
        ),
    ),
    Cause(
        "sequence_too_long",
        PROGRAM,
        "samples are longer than the model's maximum sequence length",
        "truncate or pack them to seq_length, or use a model with longer sequences or a different RoPE scaling",
        (
            Pattern("max_position_embeddings", r"(exceed|longer|greater|larger|smaller|less|must|should)"),
            Pattern("max_sequence_length", r"(exceed|longer|greater|must|should)", LIKELY),
            Pattern(
                "sequence length",
                r"(is longer than|exceeds?|greater than|larger than) .*(maximum|max|position|model|\d+)",
                LIKELY,
            ),
            Pattern("longer than", r"(sample|sequence|pack)\b.* longer than .*(seq|pack|max|position)", LIKELY),
            Pattern("length", r"\blength\b.*\b\d+\b.*\bmax(imum)?[_ ](seq\w*[_ ])?(length|\d)", LIKELY),
            Pattern("position_ids", r"(out of (range|bounds)|exceed)", LIKELY),
        ),
        message_topics=r"\b(max\w*[_ ])?seq\w*[_ ]len\w*|\bposition[_ ]embeddings?\b",
    ),
    Cause(
        "data_worker",
        PROGRAM,
        "a data worker died",
        "with num_workers=0, the error is raised in the rank itself; usual causes are lack of host memory and a small "
        "/dev/shm",
        (
            Pattern("dataloader worker", r"exited unexpectedly"),
            Pattern("dataloader worker", r"killed by signal: (?!Bus|Killed|Terminated|Interrupt)", LIKELY),
        ),
        follows=(
            *("host_out_of_memory", "shared_memory_full", "data_damaged", "data_missing", "rank_crashed", "disk_full"),
            *("open_files_limit", "rank_killed", "terminated", "cancelled", "file_missing", "data_index_cache"),
        ),
    ),
)
