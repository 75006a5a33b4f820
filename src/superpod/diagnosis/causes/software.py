"""Causes: packages, versions, tokens, downloads, options and compilers."""

from __future__ import annotations

from superpod.diagnosis.causes.table import HINT, LIKELY, PROGRAM, Cause, Pattern, phrases

CAUSES = (
    Cause(
        "missing_token",
        PROGRAM,
        "a token or login is missing, invalid, or lacks permission",
        "set HF_TOKEN (and accept the license on the model's page), WANDB_API_KEY or NGC_API_KEY in the shell from "
        "which you submit, never in a file of the run",
        (
            *phrases("gated repo", "gatedrepoerror", "invalid user token", "invalid username or password"),
            *phrases("api_key not configured", "no api key configured", "localtokennotfounderror"),
            *phrases("nocredentialserror", "expiredtoken", "signaturedoesnotmatch"),
            Pattern("is restricted", r"(access|model|must have access)"),
            Pattern("401", r"(401 Client Error|Unauthorized|HTTP 401|status code:? 401|error code: 401)", sure=LIKELY),
            Pattern("403", r"(\(403\)|403 Client Error|HTTP 403|403 Forbidden|status code:? 403)", LIKELY),
            *phrases("repositorynotfounderror", sure=LIKELY),
            *phrases("is not a local folder and is not a valid model identifier", "token is required", sure=LIKELY),
            Pattern("api key", r"(missing|invalid|not (set|found|configured)|required|must be)", LIKELY),
            Pattern("wandb", r"(permission denied|login|UsageError.*api_key|AuthenticationError)", LIKELY),
            Pattern(
                "authentication",
                r"(?<!password)authentication(error|\b.*(fail|required|invalid|error))|invalid authentication",
                LIKELY,
            ),
            Pattern("access denied", r"(s3|bucket|AccessDenied|gs://)", LIKELY),
        ),
        message_topics=r"\b(log ?in|credentials?|authenticat\w+|unauthori\w+|forbidden|api key)\b",
    ),
    Cause(
        "no_network",
        PROGRAM,
        "a download from the internet failed: the node has no internet access, or the server did not respond",
        "download the files in advance to HF_HOME on a shared disk and set HF_HUB_OFFLINE=1, or set a proxy "
        "(HTTPS_PROXY) in [env] of the profile; for W&B, set WANDB_MODE=offline",
        (
            *phrases("max retries exceeded with url", "we couldn't connect to", "localentrynotfounderror"),
            *phrases("offlinemodeisenabled", "cannot find the requested files in the"),
            *phrases("outgoing traffic has been disabled", "could not resolve host", "proxyerror"),
            *phrases("certificate_verify_failed"),
            Pattern("failed to resolve", r"(http|url|host|name|huggingface)", LIKELY),
            *phrases("temporary failure in name resolution", "read timed out", "connecttimeout", sure=LIKELY),
            *phrases("urlopen error", "sslerror", "could not connect to the endpoint", sure=LIKELY),
            Pattern(
                "rror",
                r"gaierror|name resolution|Connection refused|Connect\w*Error|timed out|unreachable",
                LIKELY,
                frame=r"/(urllib3|requests|httpx|httpcore|huggingface_hub|wandb)/|http/client\.py",
            ),
            Pattern(
                "error",
                r"^(httpx|requests|urllib3|httpcore|botocore|aiohttp)\S*(Connect|Timeout|Network|Protocol|Chunked)\w*",
                LIKELY,
            ),
            Pattern("download", r"took too long|timed out|Timeout", LIKELY),
            Pattern("50", r"50[0234] (Server Error|Bad Gateway|Service Unavailable|Gateway Time)", LIKELY),
            Pattern("wandb", r"(Network error|CommError|run initialization has timed out|timed out)", LIKELY),
        ),
        message_topics=r"\b(AWS|S3|GCS|endpoint|HTTPS?|network|internet|proxy|download\w*)\b",
    ),
    Cause(
        "rate_limited",
        PROGRAM,
        "a server rejects requests temporarily, because this account or site has sent too many",
        "download once, with one process, to HF_HOME on a shared disk, and set HF_HUB_OFFLINE=1 for the ranks; or "
        "retry later; HF_TOKEN raises the limit",
        (
            Pattern(
                "429", r"(429 Client Error|HTTP\S* 429|status code:? 429|\b429\b.*(Too Many Requests|rate.?limit))"
            ),
            Pattern("too many requests"),
            Pattern("rate limit", r"(exceed|reached|hit|too many|ratelimit)", LIKELY),
        ),
    ),
    Cause(
        "missing_package",
        PROGRAM,
        "a Python package or a shared library is not installed where the ranks run",
        "`recipes doctor` lists the installed and the missing packages; check software.python in the profile, or the "
        "container image",
        (
            *phrases("modulenotfounderror", "cannot open shared object file", "packagenotfounderror"),
            Pattern("module named", r"(no|any) module named", LIKELY),
            *phrases("package doesn't have", "distributionnotfound", sure=LIKELY),
            Pattern("not installed", r"(please|pip|package|library|module|requires|need|Error)", LIKELY),
            Pattern("please install", r"(pip|conda|package|library|it with|Error)", LIKELY),
            Pattern(
                "importerror", r"ImportError: .*(requires|needs|was not found|not found in your|must be installed)"
            ),
        ),
        message_topics=r"\b(un)?install(ed|ation)?\b(?! version)",
    ),
    Cause(
        "version_mismatch",
        PROGRAM,
        "installed packages have incompatible versions",
        "`recipes doctor` lists compatible versions; install them with `pip install -c constraints.txt`, or use a "
        "container that contains them",
        (
            *phrases("undefined symbol", "versionconflict", "is required for a normal functioning"),
            *phrases("binary incompatibility", "operator torchvision::nms does not exist"),
            *phrases("does not recognize this architecture"),
            *phrases("loading a dataset cached in a localfilesystem is not supported"),
            *phrases("cannot import name", "cuda setup failed despite", sure=LIKELY),
            *phrases("got an unexpected keyword argument", "unsupported pickle protocol", sure=LIKELY),
            *phrases("unknown model architecture", "partially initialized module", "file-format version", sure=LIKELY),
            Pattern("importerror", r"ImportError: (?!.*No module named).*(version|GLIBC|GLIBCXX|incompatible)", LIKELY),
            Pattern("glibc", r"version `GLIBC\S*' not found"),
            Pattern(
                "numpy",
                r"(compiled using NumPy 1|numpy\.core\.multiarray failed|module 'numpy' has no attribute"
                r"|numpy\.dtype size changed|numpy is not available)",
            ),
            Pattern("has no attribute", r"AttributeError: (partially initialized )?module '", LIKELY),
            Pattern("attributeerror", r"AttributeError: (?!'NoneType').*(has no attribute|can't set attribute)", HINT),
            Pattern("importerror", r"ImportError: (?!.*No module named)", HINT),
            Pattern(
                "typeerror",
                r"TypeError: \S+ (takes .*positional arguments? but|got multiple values for|must be an? .*\bgot\b)",
                HINT,
            ),
            Pattern("missing", r"TypeError: \S+\(\) missing \d+ required (positional|keyword)", LIKELY),
            Pattern(
                "version",
                r"(requires?|required|needs?|expects?|must be|found|but)\b.*\bversion\b.*(but|found|installed|got"
                r"|have|or (newer|higher|later)|>=|<=)",
                LIKELY,
            ),
            Pattern("refused: ", r"refused: .*(version|megatron|nemo|torch|transformer|cuda|driver)", LIKELY),
            Pattern("cuda version", r"(mismatch|does not match|mismatches|incompatible|different)"),
        ),
        follows=("driver", "missing_package"),
        topics=r"\b(version|deprecat\w+|upgrade|downgrade|failed to import)\b|<module>: (from|import) |\bimportlib\b",
    ),
    Cause(
        "wrong_option",
        PROGRAM,
        "an option or a configuration field is unknown, missing, or has an invalid value",
        "`recipes show NAME` lists the fields of a recipe, and `--help` the options; for Megatron-LM, use the version "
        "that the script was written for",
        (
            *phrases("unrecognized arguments", "is not in struct", "/override_grammar/", any_level=True),
            Pattern("usage: ", r"^usage: \S", LIKELY, alone=False, any_level=True),
            Pattern(
                "argument",
                r"arguments?\b.*\b(are|is|were) not (used|known|recogni[sz]ed|supported|accepted)\b"
                r"|(unknown|unexpected|unused) arguments?",
                LIKELY,
            ),
            Pattern("error: argument", r"(invalid|expected|required|choice)"),
            *phrases("the following arguments are required", "invalid choice", "configattributeerror"),
            *phrases("missingmandatoryvalue", "could not override", "missingconfigexception", "has no field"),
            *phrases("invalid value for", "no parameter named", "got unexpected extra argument"),
            Pattern("no such ", r"no such (option|command)\b", any_level=True),
            Pattern("full_key:", sure=LIKELY, any_level=True),
            *phrases("omegaconf.errors", "extra inputs are not permitted", "invalid literal for int()", sure=LIKELY),
            *phrases("misconfigurationexception", "in call to target", sure=LIKELY),
            Pattern("target module", r"Target modules? .*(not found|not supported)|Target module \w+\(", LIKELY),
            Pattern("validationerror", r"validation errors? for"),
            Pattern("validation error", r"validation error( for|:)", LIKELY),
            Pattern("must be specified", r"(--|arg|assert|Error)", HINT),
            Pattern("assert", r"Error: assert .*\b(self|args|cfg|config|opts?)\.\w+ *([<>=!]=?|in|is)\W", HINT),
            Pattern("yaml", r"(ScannerError|ParserError|while (parsing|scanning))"),
        ),
        topics=(
            r"\b(config(?!ured)\w*|options?|settings?|flags?|hyper-?parameters?)\b|(?<!\w)--[a-z][\w-]+|\.ya?ml\b"
            r"|\b(overrid\w+|omegaconf|hydra|argparse|pydantic|jsonargparse|hf_argparser)\b|parse_args|validate_|__post_init__"
        ),
        fallback=(
            r"^(\w+\.)*(Value|Assertion|NotImplemented|Config\w*)Error: "
            r".*\b(must|should|requires?|expected (?!\d)|please (specify|set|pass|provide)|cannot|can't|either"
            r"|incompatible with|only (supports?|allows?|accepts?|works?)|unsupported|unknown|invalid|unrecognized"
            r"|not (yet )?(supported|allowed|valid|implemented|recognized|compatible|used by))\b"
        ),
    ),
    Cause(
        "syntax_error",
        PROGRAM,
        "a Python file has a syntax error or an undefined name",
        "correct the line in the message; `recipes check FILE.py` checks a recipe file without a GPU",
        (
            *phrases("syntaxerror", "indentationerror", "taberror"),
            *phrases("nameerror", "unboundlocalerror", sure=LIKELY),
        ),
    ),
    Cause(
        "compile_failed",
        PROGRAM,
        "a kernel or an extension could not be compiled on the node",
        "install a compiler (gcc, nvcc) and the Python headers in the image, and put TRITON_CACHE_DIR and "
        "TORCH_EXTENSIONS_DIR on a local disk; TORCHDYNAMO_DISABLE=1, or disabling jit_fuser, avoids compilation",
        (
            *phrases("error building extension", "ninja: build stopped", "failed to find c compiler"),
            *phrases("backendcompilerfailed", "inductorerror", "loweringexception", "out of resource: shared memory"),
            *phrases("cuda_home environment variable is not set"),
            Pattern("ninja", r"(is required|not found|not available|subprocess)", LIKELY),
            Pattern("ptxas", r"(fatal|error)"),
            Pattern("torch._dynamo", r"exc\.\w+"),
            Pattern("triton", r"(CompilationError|OutOfResources|compil\w+ (error|failed)|autotun\w* (error|failed))"),
            Pattern("nvcc", r"(fatal|error|not found|No such)"),
            Pattern("fatal error:", r"\.h(pp)?: No such file"),
            Pattern("nvrtc", r"(error|fail)", LIKELY),
            *phrases("llvm error", "command '['gcc", sure=LIKELY),
            Pattern("error: '", r"error: '\w+\.\w+' op ", LIKELY),
            Pattern("error:", r"\.(h|hpp|hh|cuh?|cc|cpp|inc)(:\d+|\(\d+\))+: (fatal )?error:"),
            Pattern("calledprocesserror", r"(gcc|g\+\+|nvcc|cc1plus|/cc|ninja|clang)"),
        ),
        follows=("disk_full", "quota", "file_locks", "missing_package", "filesystem_error"),
        topics=r"cpp_extension\.py|op_builder|torch/_(inductor|dynamo)|\btriton/|\bnvvm|\bptx",
    ),
    Cause(
        "cannot_pickle",
        PROGRAM,
        "an object cannot be pickled for another process",
        "do not pass lambdas or local functions to data workers and spawned processes",
        (
            Pattern(" pickle", r"(can't|cannot|could not) pickle"),
            Pattern("can't get attribute", sure=LIKELY),
        ),
        message_topics=r"\bpickl\w+",
    ),
    Cause(
        "process_group_order",
        PROGRAM,
        "process groups were used before their initialization, or initialized twice",
        "use one launcher (srun or torchrun, not torchrun inside srun), and call init_process_group before any "
        "collective",
        (
            *phrases("default process group has not been initialized"),
            *phrases("trying to initialize the default process group twice", "invalid rank"),
            *phrases("not part of process group", "keyerror: 'rank'"),
            Pattern("initialized", r"(parallel|process) group is (not|already) initialized"),
            Pattern("error initializing torch.distributed using", r"expected|missing"),
            Pattern("environment variable", r"(RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected"),
            Pattern("init_process_group", r"please (initialize|call|make sure)", LIKELY),
            Pattern("could not find", r"Could not find '?(LOCAL_)?(RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)"),
            Pattern("local_rank", r"KeyError: '(LOCAL_)?(RANK|WORLD_SIZE)'"),
            Pattern("you set `--ntasks", r"does not match|SLURM"),
        ),
        message_topics=r"\bprocess[ _]?groups?\b",
    ),
)
