"""Causes: checkpoints, weights, tokenizers and data."""

from __future__ import annotations

from .table import HINT, LIKELY, PROGRAM, Cause, Sign

CAUSES = (
    Cause(
        "checkpoint_damaged",
        PROGRAM,
        "a checkpoint is incomplete or damaged: a save was cut off, or files were lost since",
        "`recipes ckpt verify RUN` names the files; resuming takes the newest intact checkpoint by itself",
        (
            Sign("pytorchstreamreader failed"),
            Sign("failed finding central directory", sure=LIKELY),
            Sign("invalid header or archive is corrupted"),
            Sign("safetensorerror", r"(incomplete|header|invalid|too (large|small)|metadata)"),
            Sign("incompletemetadata"),
            Sign("ran out of input", sure=LIKELY),
            Sign("eoferror", r"(unpickler|serialization|pickle)\.py", LIKELY),
            Sign("unexpected end of", r"(file|data|archive|stream)|EOF", LIKELY),
            Sign("unpicklingerror", r"(?!.*[Ww]eights.only)", LIKELY),
            Sign("pickle data was truncated"),
            Sign("is not a distributed checkpoint"),
            Sign("not a zip file", sure=LIKELY),
            Sign("badzipfile", sure=LIKELY),
            Sign(
                "checkpoint",
                r"(checkpoint|metadata|shard)\b.*\b(is |are )?(corrupt(ed)?|damaged|incomplete|truncated|not whole"
                r"|unfinished)",
            ),
            Sign("none of its", r"checkpoints? (is|are) (intact|whole)"),
            Sign("checkpointingexception", r"(could not be loaded|not found|missing)", LIKELY),
            Sign(".distcp", r"No such file|not found|Errno 2"),
            Sign(".metadata", r"No such file|not found|Errno 2|EOF"),
            Sign("metadata.json", r"(No such file|not found|Errno 2)", LIKELY),
            Sign("shardedobject are missing"),
            Sign("missing shard", sure=LIKELY),
            Sign(
                "checksum",
                r"(mismatch|fail|does not match).*(checkpoint|file|shard)|(checkpoint|file|shard).*checksum",
                LIKELY,
            ),
            Sign("storage has wrong byte size"),
            Sign("unable to load weights from", sure=LIKELY),
            Sign("cannot find", r"cannot find \S+\.(bin|safetensors|pt|distcp)\b", LIKELY),
            Sign("unexpected eof", r"expected \d+ more bytes|corrupt"),
        ),
        follows=("disk_full", "quota", "filesystem_error"),
    ),
    Cause(
        "checkpoint_other_layout",
        PROGRAM,
        "the checkpoint was saved under another TP, PP, EP or DP than this run has, in a format that does not change "
        "it",
        "resume with the layout that saved it (`recipes ckpt list RUN`), or save with "
        "trainer.strategy.ckpt_optim_fully_reshardable=True to change TP or PP between attempts",
        (
            # Optimizer states of experts are stored in a shape that depends on TP and EP.
            Sign("global shape mismatch", r"\bkey optimizer\.", LIKELY),
            Sign("from model not in state dict", sure=LIKELY),
            Sign("optimizer.", r"(KeyError|not in|Missing key).*optimizer\.(distributed|state)", LIKELY),
            Sign(
                "parallel_size", r"(value )?(from|of|in) (the )?checkpoint.*(is )?(not equal|!=|differ|does not match)"
            ),
            Sign("parallel size", r"checkpoint.*(mismatch|differ|not equal|does not match)|mismatch.*checkpoint"),
            Sign(
                "checkpoint",
                r"checkpoint (was |is )?(saved|trained|written|created)\b.*\b(tp|pp|ep|tensor|pipeline|layout"
                r"|world.?size|ranks).*(but|and|while|not)",
            ),
            Sign(
                "world size",
                r"checkpoint.*world.?size.*(differ|mismatch|not equal|does not match|but)|different world size",
                sure=LIKELY,
            ),
            Sign("checkpoint", r"checkpoint for \w+ ?= ?\d+ but", LIKELY),
            Sign("(tp, pp)", r"mismatch"),
            Sign("of another tp or pp"),
            Sign("cannot be loaded under"),
            Sign("zero checkpoint", r"world.?size|dp", sure=LIKELY),
            Sign("dp world size", r"automatic adjustment of ZeRO|cannot|not support", sure=LIKELY),
            Sign("mp_rank_", r"(No such file|not found|Errno 2)", sure=LIKELY),
            Sign("invalid access pattern", sure=LIKELY),
            Sign("flattened ranges dont cover", sure=LIKELY),
            Sign("expected_shape", r"does not match|mismatch", LIKELY),
        ),
    ),
    Cause(
        "checkpoint_other_model",
        PROGRAM,
        "the checkpoint is of another model than the one that was built",
        "compare the two: `recipes ckpt list RUN` and `recipes show NAME`; a fine-tuning starts from a model of its "
        "own "
        "size; an adapter loads with its base",
        (
            Sign("size mismatch for", sure=LIKELY),
            # The global shape of a weight does not depend on the layout, except for padding to a multiple of TP.
            Sign("global shape mismatch", r"mismatch(?!.*\bkey optimizer\.)", LIKELY),
            Sign("error(s) in loading state_dict", sure=LIKELY),
            Sign("missing key(s) in state_dict", sure=LIKELY),
            Sign("unexpected key(s) in state_dict", sure=LIKELY),
            Sign("missing key in checkpoint state_dict"),
            Sign("not found in checkpoint", r"\bkeys?\b|parameter|tensor", LIKELY),
            Sign("keyerror", sure=LIKELY, frame=r"(dist_checkpointing|distributed/checkpoint)/"),
            Sign("checkpoint", r"value from checkpoint \(.*\) is not equal to the input argument value"),
            Sign("argument value", r"value from checkpoint"),
            Sign("unexpected key", r"(checkpoint|state.?dict)", LIKELY),
            Sign("missing key", r"(checkpoint|state.?dict)", LIKELY),
            Sign("size mismatch between saved"),
            Sign("doesn't match the size of optimizer's group", sure=LIKELY),
            Sign("you are trying to load a checkpoint", r"(type|model)", LIKELY),
            Sign("model type", r"checkpoint.*(type|architecture).*(not (match|supported|recognize)|differ)", LIKELY),
        ),
        follows=("checkpoint_other_layout", "checkpoint_damaged", "vocabulary_mismatch"),
        about=r"\b(checkpoint|ckpt|state[_ ]dict)\b"
        r"|load_(state_dict|checkpoint|from_checkpoint)|torch/serialization\.py load",
    ),
    Cause(
        "checkpoint_missing",
        PROGRAM,
        "the checkpoint or the weights that the run starts from are not there",
        "`recipes ckpt list RUN`; the path must be on a disk that every node sees; a model by name is imported first "
        "(`recipes ckpt convert`)",
        (
            Sign(
                "checkpoint",
                r"(could not|cannot|can't|unable to|failed to) (find|locate) (any |a |the )?(\w+ )?checkpoint",
            ),
            Sign(
                "checkpoint",
                r"^(?!.*Parent directory).*checkpoint\S* "
                r"(directory |file |path |at \S+ )?\S* ?(does not|doesn't) exist",
            ),
            Sign(
                "no checkpoint",
                r"no (valid |whole |distributed )?checkpoints? (was |were )?(found|exists?|available)",
                LIKELY,
            ),
            Sign("latest_checkpointed_iteration.txt", r"(could not|cannot|unable|No such|not found|missing)"),
            Sign("exiting because", r"exit-on-missing-checkpoint|missing checkpoint", LIKELY),
            Sign("must be an existing", r"checkpoint", LIKELY),
            Sign("should have a `model_type` key", sure=LIKELY),
            Sign("no file named", r"(pytorch_model|model\.safetensors|\.bin)"),
            Sign("not found", r"checkpoint \S+ (was )?not found|restore\S* path .* not found"),
            Sign("error no file named"),
            Sign("does not appear to have a file named"),
            Sign("hfvalidationerror", sure=LIKELY),
            Sign("not a valid", r"not a valid (\w+ )?checkpoint"),
            Sign("no such file", r"No such file.*\b(checkpoints?|ckpts?)\b", LIKELY),
            Sign("model.safetensors.index.json", r"No such file|not found"),
        ),
        follows=("no_network", "missing_token"),
    ),
    Cause(
        "checkpoint_unsafe",
        PROGRAM,
        "torch.load takes weights only, and the file holds other objects",
        "load it with torch.load(..., weights_only=False) if you trust the file, or name its classes "
        "(torch.serialization.add_safe_globals); a newer library of the writer's does that",
        (
            Sign("weights only load failed"),
            Sign("weights_only", r"(Unsupported global|WeightsUnpickler|add_safe_globals|`weights_only`)"),
            Sign("weightsunpickler error"),
            Sign("types accepted by default with weights_only", sure=LIKELY, any_level=True),
            Sign("weights_only", r"default value of the `?weights_only|re-running `?torch\.load`? with", LIKELY),
            Sign("unpicklingerror", sure=LIKELY, frame=r"_weights_only_unpickler"),
        ),
    ),
    Cause(
        "checkpoint_save",
        PROGRAM,
        "a checkpoint could not be saved",
        "what is printed next to it says why; disk, quota and host memory first; log.ckpt.async_save=False to see "
        "the error "
        "where it happens",
        (
            Sign("worker failure", r"(write|writing|checkpoint|proc)", LIKELY),
            Sign("local process", r"encountered an error", LIKELY),
            Sign(
                "checkpoint",
                r"(fail|error|unable|could not|cannot)\w*.*\b(sav(e|ing)|writ(e|ing)|finaliz\w+)\b.*checkpoint",
                LIKELY,
            ),
            Sign("async", r"(asynchronous|async)\w* (checkpoint|save).*(fail|error|died|exit)", LIKELY),
            Sign("pytorchstreamwriter failed", sure=LIKELY),
            Sign("parent directory", r"Parent directory .* does not exist", LIKELY),
            Sign("open file failed because of", sure=LIKELY),
            Sign("cannot be opened", r"File .* cannot be opened", LIKELY),
            Sign("inline_container.cc", r"(unexpected pos|write)", LIKELY),
            Sign("iostream error", sure=LIKELY),
            Sign("error while serializing"),
            Sign("asynccallsqueue", r"error|fail", LIKELY),
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
        about=r"save_(checkpoint|model|pretrained|state_dict)|torch/serialization\.py _?save",
    ),
    Cause(
        "vocabulary_mismatch",
        PROGRAM,
        "the vocabulary of the data, tokenizer or checkpoint does not match the model's embedding",
        "the data's tokenizer must be the model's (dataset.json names it); prepare "
        "the data "
        "anew, or build the model with that vocabulary",
        (
            Sign("index out of range in self", sure=LIKELY),
            Sign("srcindex < srcselectdimsize", sure=LIKELY),
            Sign("index out of bounds", r"(Assertion|Indexing|IndexKernel|ScatterGather|vectorized_gather)", LIKELY),
            Sign("t >= 0 && t < n_classes"),
            Sign(
                "vocab",
                r"vocab\w*([ _-]?size)?\b.*(mismatch|not equal|does not match|differs?|smaller than|larger than"
                r"|not match|!=|exceeds?|disagree)",
            ),
            Sign("vocab", r"(mismatch|does not match|differs?|exceeds?|outside|beyond|larger than)\b.*vocab"),
            Sign(
                "token",
                r"token(s| ids?| id \d+)?\b.*(out of (range|vocab|bounds)|exceed|beyond|outside|greater than|>=).*",
            ),
            Sign("word_embeddings.weight", r"(size mismatch|shape mismatch|mismatch)", LIKELY),
            Sign("embed_tokens.weight", r"(size mismatch|shape mismatch|mismatch)", LIKELY),
            Sign("output_layer.weight", r"(Global shape mismatch|size mismatch)", LIKELY),
            Sign("lm_head.weight", r"size mismatch", LIKELY),
            Sign(
                "tokenizer",
                r"tokenizer\b.*(vocab\w*)?.*(mismatch|does not match|differs? from|not the (same|one)|is not the)",
                LIKELY,
            ),
            Sign("padded_vocab_size", r"(not equal|mismatch|differ|checkpoint)"),
            Sign("cur_target >= 0 && cur_target < n_classes"),
            Sign("target", r"Target -?\d+ is out of bounds"),
        ),
        speaks=r"\bvocab\w*",
    ),
    Cause(
        "tokenizer_missing",
        PROGRAM,
        "the tokenizer cannot be loaded",
        "a folder or file that every node sees, and the library that it needs (sentencepiece, tiktoken, protobuf); a "
        "name on "
        "the Hub needs HF_HOME with it when nodes are offline",
        (
            Sign("can't load tokenizer for"),
            Sign("couldn't instantiate the backend tokenizer"),
            Sign("unable to load vocabulary"),
            Sign("tokenizer.model", r"(No such file|Not found|does not exist|not a file|cannot be (found|opened))"),
            Sign("sentencepiece", r"(ParseFromArray|Not found|Error #2|not installed|LoadFromFile|InternalError)"),
            Sign(
                "tokenizer",
                r"(could not|cannot|can't|unable to|failed to) (be )?(load|find|instantiate|open|import).*tokenizer",
                LIKELY,
            ),
            Sign(
                "tokenizer",
                r"tokenizer\S* (path |file |model )?\S* ?(is invalid|not found|does not exist|missing)",
                LIKELY,
            ),
            Sign("tokenizer class", r"does not exist or is not currently imported"),
            Sign("vocab file", r"(not found|does not exist|No such)"),
            Sign("merges file", r"(not found|does not exist|No such)"),
            Sign("data did not match any variant of untagged enum"),
            Sign("no chat template", r"tokenizer|chat_template", LIKELY),
            Sign("chat_template is not set"),
        ),
        follows=("missing_token", "no_network", "missing_package"),
        about=r"tokeniz(er|ation_\w+\.py)",
    ),
    Cause(
        "data_missing",
        PROGRAM,
        "the data is not where the run looks for it",
        "the prefix without .bin or .idx, on a disk that every node sees and in container.mounts; dataset.json lists "
        "the prefixes",
        (
            Sign(".idx", r"(No such file|cannot be found|not found|does not exist|Errno 2)"),
            Sign(".bin", r"(\.idx and \.bin|cannot be found at the path prefix|indexed).*"),
            Sign(
                "data",
                r"(dataset|data (folder|path|prefix|file)|training data)\b.*(not found|does not exist"
                r"|cannot be found|no such)",
                LIKELY,
            ),
            Sign("dataset", r"\b(undefined|unknown|undeclared|no such) dataset\b", LIKELY),
            Sign(
                "data",
                r"\b\w*data\w*/\S*\.(json|csv|tsv|txt|arrow|npy|h5|hdf5|zip|tar)\b.*(not found|does not exist)"
                r"|(No such file|Errno 2).*\b\w*data\w*/\S*\.(json|csv|tsv|txt|arrow|npy|h5|hdf5|zip|tar)\b",
                LIKELY,
            ),
            Sign(".jsonl", r"(No such file|not found|does not exist|Errno 2)"),
            Sign(".parquet", r"(No such file|not found|does not exist|Errno 2)"),
            Sign("couldn't find any data file"),
            Sign("path should be a basename", r"\.idx and \.bin"),
            Sign("couldn't find a dataset script", sure=LIKELY),
            Sign("datasetnotfounderror"),
        ),
        follows=("no_network", "missing_token", "filesystem_error"),
    ),
    Cause(
        "data_damaged",
        PROGRAM,
        "a data file cannot be read as what it should be",
        "look at the file of the message; `recipes data build` makes it anew and names a row that it cannot read",
        (
            Sign("bad header", r"cannot read|idx|index|indexed"),
            Sign("index file", r"(does ?n[o']t|not) match (the )?expected format", LIKELY),
            Sign("indexheader", sure=LIKELY),
            Sign("jsondecodeerror", sure=LIKELY),
            Sign(
                "json",
                r"(Expecting (value|property name|',' delimiter|':' delimiter)|Unterminated string|Extra data"
                r"|invalid json|JSON parse error)",
                LIKELY,
            ),
            Sign("arrowinvalid"),
            Sign("nonmatchingsplitssizeserror"),
            Sign("unidentifiedimageerror"),
            Sign("parquet magic bytes not found"),
            Sign("mmap length is greater than file size"),
            Sign("unicodedecodeerror", sure=LIKELY),
            Sign("buffer is smaller than requested size"),
            Sign("datasetgenerationerror", sure=LIKELY),
            Sign("gzip", r"(Not a gzipped file|CRC check failed)"),
            Sign("cannot reshape array of size", sure=HINT),
            Sign("unsupported code", r"dtype"),
            Sign("error -3 while decompressing"),
        ),
        follows=("data_missing", "disk_full", "quota"),
        about=r"data_?sets?(?![a-z])|\bcolumns?\b|\bjsonl\b|torch/utils/data/|data_?loader|\bpyarrow\b|\bBuilderConfig\b"
        r"|\b(tar|zip|image) ?file\b|\b(LZMA|tarfile)\w*",
    ),
    Cause(
        "data_exhausted",
        PROGRAM,
        "the data is shorter than the run, or a split of it is empty",
        "fewer steps, more epochs (num_epochs, reuse of samples), or another split: dataset.json counts the tokens",
        (
            Sign("stopiteration", sure=LIKELY),
            Sign("not enough", r"not enough (samples|data|documents|tokens|sequences)"),
            Sign(
                "samples",
                r"(num_samples|number of samples|dataset)\b.*(should be a positive|must be (positive|> ?0)|is (0"
                r"|zero|empty)|less than|fewer)",
                LIKELY,
            ),
            Sign("num_samples", r"should be a positive integer value, but got num_samples=0"),
            Sign("no samples", sure=LIKELY),
            Sign("out of bounds for size 0", sure=LIKELY),
            Sign("empty", r"(dataset|split|dataloader|blend) \S* ?(is|was) empty|empty (dataset|split)", LIKELY),
            Sign("could not sample from the dataset"),
            Sign("requested", r"requested .* samples? .*(only|but).*(available|has|contains)", LIKELY),
            Sign("oversampl", r"(must|should|cannot)", LIKELY),
            Sign("consumed all", r"samples|data", LIKELY),
            Sign("total number of samples", r"consumed", LIKELY),
            Sign("no sample to consume"),
            Sign("no samples left to consume"),
            Sign("no training would occur", sure=LIKELY),
        ),
    ),
    Cause(
        "data_index_cache",
        PROGRAM,
        "the index of the data was built by one rank, and others do not see it, or two built it at once",
        "path_to_cache on a disk that every node sees, or build the index beforehand with one process; a left-over "
        "half of "
        "it is to be removed",
        (
            Sign("path_to_cache", r"(not|missing|fail|error)", LIKELY),
            Sign(
                "index",
                r"(document|sample|shuffle)_?index\.npy.*(No such|not found|Errno 2|cannot)|Errno 2.*(document"
                r"|sample|shuffle)_index\.npy",
            ),
            Sign(
                ".npy",
                r"(No such file|Errno 2).*(cache|index|indices|GPTDataset)|(cache|index|indices"
                r"|GPTDataset).*(No such file|Errno 2)",
            ),
            Sign("cannot build", r"(index|helpers)", LIKELY),
            Sign("helpers_cpp", r"(No module|cannot import|undefined|not found|failed|error)", LIKELY),
            Sign("compile_helpers", r"(fail|error)", LIKELY),
            Sign("dataset helper", r"fail", any_level=True),
            Sign("no data left in file", sure=LIKELY),
            Sign("failed to interpret file", r"npy|pickle", LIKELY),
            Sign("reused local directory", sure=LIKELY),
        ),
    ),
    Cause(
        "sequence_too_long",
        PROGRAM,
        "samples are longer than the positions that the model has",
        "truncate or pack to seq_length; a model with more positions, or another rope scaling",
        (
            Sign("max_position_embeddings", r"(exceed|longer|greater|larger|smaller|less|must|should)"),
            Sign("max_sequence_length", r"(exceed|longer|greater|must|should)", LIKELY),
            Sign(
                "sequence length",
                r"(is longer than|exceeds?|greater than|larger than) .*(maximum|max|position|model|\d+)",
                LIKELY,
            ),
            Sign("longer than", r"(sample|sequence|pack)\b.* longer than .*(seq|pack|max|position)", LIKELY),
            Sign("length", r"\blength\b.*\b\d+\b.*\bmax(imum)?[_ ](seq\w*[_ ])?(length|\d)", LIKELY),
            Sign("position_ids", r"(out of (range|bounds)|exceed)", LIKELY),
        ),
        speaks=r"\b(max\w*[_ ])?seq\w*[_ ]len\w*|\bposition[_ ]embeddings?\b",
    ),
    Cause(
        "data_worker",
        PROGRAM,
        "a data worker died",
        "num_workers=0 shows its error in the rank itself; host memory and /dev/shm are the usual reasons",
        (
            Sign("dataloader worker", r"exited unexpectedly"),
            Sign("dataloader worker", r"killed by signal: (?!Bus|Killed|Terminated|Interrupt)", LIKELY),
        ),
        follows=(
            *("host_out_of_memory", "shared_memory_full", "data_damaged", "data_missing", "rank_crashed", "disk_full"),
            *("open_files_limit", "rank_killed", "terminated", "cancelled", "file_missing", "data_index_cache"),
        ),
    ),
)
