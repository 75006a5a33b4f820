"""Causes: GPUs, drivers and nodes."""

from __future__ import annotations

from superpod.diagnosis.causes.table import ECHO, ENDING, GROUND, HINT, LIKELY, PROGRAM, Cause, Pattern, phrases

_XID = r"\bXid\b.*?(?:\)\s*:|:)\s*{codes}\b(?!:)"

CAUSES = (
    Cause(
        "gpu_lost",
        GROUND,
        "a GPU has fallen off the bus: the node no longer detects it",
        "exclude the node, have it rebooted or repaired, and check it with `recipes cluster health PROFILE --nodes "
        "NODE`; then resume",
        (
            *phrases("fallen off the bus", "gpu is lost", any_level=True),
            Pattern("xid", _XID.format(codes="79"), any_level=True),
            Pattern("unable to determine the device handle for gpu"),
            Pattern("cuda_error_device_unavailable", sure=LIKELY),
            Pattern("gpu", r"GPU (has )?disappeared|lost GPU|GPU requires reset", LIKELY),
        ),
    ),
    Cause(
        "gpu_ecc",
        GROUND,
        "a GPU had an uncorrectable memory error",
        "reset or replace the GPU (`nvidia-smi -q -d ECC,ROW_REMAPPER` on the node) and exclude the node; then resume",
        (
            *phrases("uncorrectable ecc error", "ecc_uncorrectable", "eccuncorrectable", "contained ecc error"),
            Pattern("double bit ecc", any_level=True),
            Pattern("xid", _XID.format(codes="(48|63|64|92|94|95|140|160)"), any_level=True),
            Pattern("ecc", r"(uncorrect\w*|double.bit|DBE).*(error|count|volatile).*[1-9]", LIKELY),
            Pattern("row remap", r"(fail|pending)", LIKELY, any_level=True, alone=False),
            Pattern("uncorrectable hardware error", sure=LIKELY, any_level=True),
        ),
    ),
    Cause(
        "gpu_firmware",
        GROUND,
        "the GPU System Processor (GSP) no longer responds to the driver",
        "exclude the node until its GPU is reset or the node is rebooted; a newer driver fixes some cases",
        (
            Pattern("xid", _XID.format(codes="(119|120|62|158)"), any_level=True),
            Pattern("gsp", r"\bGSP\b.*(timeout|timed out|GSP RPC|crash|error|fail)", LIKELY, any_level=True),
        ),
    ),
    Cause(
        "gpu_xid",
        GROUND,
        "the driver reported a GPU error (Xid)",
        "look up the number in NVIDIA's Xid catalog; run `dcgmi diag -r 3` on the node, and `recipes cluster health "
        "PROFILE`",
        (
            Pattern("xid", _XID.format(codes="(?!13\\b|31\\b|43\\b|45\\b)\\d+"), LIKELY, any_level=True),
            Pattern("gpu has encountered an error", sure=LIKELY),
        ),
        follows=("gpu_lost", "gpu_ecc", "gpu_firmware", "nvlink", "gpu_illegal_access", "gpu_assert"),
    ),
    Cause(
        "gpu_throttled",
        GROUND,
        "a GPU reduced its clocks because of its temperature or power limit",
        "run `nvidia-smi -q -d PERFORMANCE,TEMPERATURE` on the node; `recipes cluster bisect PROFILE` finds slow nodes",
        (
            Pattern(
                "slowdown",
                r"(HW|SW|thermal|power)[ _-]*(brake|thermal)?[ _-]*slowdown.*(: *|is |was )?(active|detected|asserted)",
            ),
            Pattern("thermal", r"(GPU|device).*(throttl|violation|limit (reached|exceeded)|shutdown)", LIKELY),
            Pattern("throttl", r"(GPU|clocks?).*throttl(ed|ing)", LIKELY),
        ),
    ),
    Cause(
        "gpu_illegal_access",
        PROGRAM,
        "a kernel accessed an illegal GPU memory address",
        "a small run with CUDA_LAUNCH_BLOCKING=1 identifies the kernel; the bug is in the kernel or its inputs; first "
        "disable the most recently added fusion or attention kernel (NVTE_FUSED_ATTN=0, NVTE_FLASH_ATTN=0)",
        (  # not certain: CUDA reports kernel errors and hardware faults at a later call
            *phrases("illegal memory access", "cuda_error_illegal_address", "cudaerrorillegaladdress", sure=LIKELY),
            *phrases("misaligned address", "illegal instruction was encountered", sure=LIKELY),
            *phrases("cuda error: invalid program counter", sure=LIKELY),
            Pattern("memory access fault by gpu", sure=LIKELY, any_level=True),
            Pattern("xid", _XID.format(codes="(13|31)"), LIKELY, any_level=True),
        ),
        follows=("gpu_lost", "gpu_ecc", "gpu_firmware", "nvlink", "vocabulary_mismatch", "gpu_assert"),
    ),
    Cause(
        "gpu_assert",
        PROGRAM,
        "a device-side assertion failed, usually an index out of range",
        "a small run with CUDA_LAUNCH_BLOCKING=1 identifies the operation; check token ids, labels and positions first",
        (
            Pattern("device-side assert", r"device-side assert(?!ions)", LIKELY),
            *phrases("cudaerrorassert", "cuda_error_assert", sure=LIKELY),
            Pattern("assertion", r"\.cu[h]?:\d+: .*block: \[\d+.*Assertion"),
        ),
        follows=("vocabulary_mismatch", "sequence_too_long"),
    ),
    Cause(
        "gpu_launch_failure",
        PROGRAM,
        "a kernel failed without a specific error; errors printed near it may belong to other kernels",
        "check the kernel log of the node first (`dmesg | grep -i xid`); then use CUDA_LAUNCH_BLOCKING=1",
        (
            *phrases("unspecified launch failure", "cudaerrorlaunchfailure", "cuda_error_launch_failed"),
            *phrases("too many resources requested for launch", "launch timed out and was terminated"),
            *phrases("cuda error: unknown error", "cudaerrorunknown", sure=LIKELY),
            *phrases("cuda error: operation not supported", sure=LIKELY),
            Pattern("invalid configuration argument", r"CUDA|\w\.cuh?\b", LIKELY),
            Pattern("cuda error: invalid argument", sure=HINT),
            Pattern("hsa_status_error", sure=LIKELY, any_level=True),
        ),
        follows=("gpu_illegal_access", "gpu_assert", "gpu_xid", "gpu_out_of_memory"),
        topics=r"\bCUDA (driver )?(error|runtime)\b|\bcuda\w*Error\b|\w\.cuh?\b",
    ),
    Cause(
        "gpu_missing",
        PROGRAM,
        "the rank sees no GPU, or fewer GPUs than requested",
        "run `nvidia-smi` on the node and in the container; check the job's --gpus-per-node and CUDA_VISIBLE_DEVICES",
        (
            *phrases("no cuda gpus are available", "no cuda-capable device is detected", "found no nvidia driver"),
            *phrases("invalid device ordinal", "couldn't communicate with the nvidia driver"),
            *phrases("torch not compiled with cuda enabled", "no supported gpu backend found"),
            Pattern("failed to initialize nvml", sure=LIKELY, any_level=True),
            *phrases("cuda unknown error", "devices are busy or unavailable", sure=LIKELY),
            Pattern(
                "gpus",
                r"\b(available|visible|requested) (gpus|devices)\b.*(less|fewer|smaller) than"
                r"|(requested|needs?|requires?|use) \d+ gpus\b.*\bonly\b",
                LIKELY,
            ),
            Pattern("placement group", r"timed out|cannot be|infeasible", LIKELY),
            Pattern("device count", r"(expected|requested|need).*(but|only).*(found|available|visible)", LIKELY),
            Pattern("you requested gpu", r"but your machine only has"),
            Pattern("libcuda.so", r"cannot open shared object"),
            Pattern("gpu", r"No GPUs? (found|available|detected)|machine has no GPU", LIKELY),
        ),
        follows=("gpu_lost", "driver"),
        message_topics=r"\b(CUDA|GPUs?) (is |are )?not (available|found|detected|visible)\b",
    ),
    Cause(
        "driver",
        PROGRAM,
        "the NVIDIA driver is too old for this CUDA version, or was only partly updated",
        "install a newer driver, or use an image with an older CUDA version (`recipes doctor`); reboot the node after "
        "a driver update",
        (
            *phrases("driver version is insufficient", "nvidia driver on your system is too old"),
            *phrases("driver/library version mismatch", "forward compatibility was attempted on non supported hw"),
            *phrases("cudaerrorinsufficientdriver", "unsupported display driver / cuda driver combination"),
            *phrases("provided ptx was compiled with an unsupported toolchain", "cudaerrorsystemdrivermismatch"),
            Pattern("api version mismatch", r"NVRM|kernel module", any_level=True),
        ),
    ),
    Cause(
        "gpu_unsupported",
        PROGRAM,
        "the program was not compiled for this GPU architecture",
        "use a container or wheel that was built for this GPU (TORCH_CUDA_ARCH_LIST); `recipes doctor` lists versions",
        (
            *phrases("no kernel image is available", "cudaerrornokernelimagefordevice"),
            Pattern("is not compatible with the current pytorch installation", any_level=True, alone=False),
            Pattern("compute capability", r"(require|needs?|at least|or higher|not supported|only support)"),
            Pattern("sm_", r"(not supported|is not (a recognized|compatible)|Unsupported gpu architecture)", LIKELY),
            Pattern(
                "fp8",
                r"(requires?|only supported|not supported|needs).*(Hopper|Ada|Blackwell|capability|H100|8\.9|9\.0)",
            ),
            *phrases("mxfp8", "nvfp4", pattern=r"not supported|requires|supported only"),
            Pattern("flashattention only supports", r"Ampere|GPUs?"),
            Pattern(
                "bf16",
                r"(doesn't|does not) support bf16"
                r"|(is )?not supported (on|by) (this|your) (GPU|device)|bfloat16.*only supported on",
                LIKELY,
            ),
        ),
        message_topics=r"\b(GPU|device|card)\b.*\b(too old|unsupported|not supported)\b",
    ),
    Cause(
        "cuda_library",
        PROGRAM,
        "cuBLAS, cuDNN or another CUDA library failed",
        "use libraries of the same release (`recipes doctor`), and check LD_LIBRARY_PATH for a second cuDNN; the GPU "
        "may also be out of memory: cuBLAS does not report that its workspace did not fit",
        (
            Pattern("cublas_status_", r"CUBLAS_STATUS_(?!ALLOC_FAILED|SUCCESS)\w+", LIKELY),
            Pattern("cudnn_status_", r"CUDNN_STATUS_(?!SUCCESS)\w+", LIKELY),
            *phrases("cudnn error", "cusolver error", "cublas error", sure=LIKELY),
            Pattern("cusparse", r"CUSPARSE_STATUS_(?!SUCCESS)\w+", LIKELY),
            *phrases("unable to find an engine to execute this computation", "no valid engine config"),
            Pattern("libcudnn", r"(cannot open shared object|could not load|Unable to load|Cannot load symbol)"),
            Pattern("cublaslt", r"(fail|error|Unable to find)", LIKELY),
        ),
        follows=(
            *("gpu_out_of_memory", "gpu_assert", "gpu_illegal_access", "vocabulary_mismatch", "gpu_memory_taken"),
            *("gpu_memory_fragmented", "gpu_launch_failure"),
        ),
        message_topics=r"\bcu(blas|dnn|sparse|solver|fft)\w*",
    ),
    Cause(
        "attention_unsupported",
        PROGRAM,
        "no attention kernel supports this head size, mask, precision or GPU",
        "`recipes check NAME` detects this before launch; NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 prints why each backend was "
        "rejected; NVTE_UNFUSED_ATTN=1 enables the unfused backend, which supports most configurations",
        (
            Pattern("no dot product attention", r"No dot product attention (support|backend)"),
            *phrases("no dot product attention backend is available", "invalid attention backend"),
            Pattern("flash_attn", r"head dimension|headdim.*(at most|only support)"),
            Pattern(
                "head dim",
                r"(only supports?|at most|not supported|unsupported).*head dim|head dim\w* .*(at most|not supported)",
            ),
            Pattern("fused attention", r"(not support|unsupported|does not support)", LIKELY),
        ),
        message_topics=r"\bflash[_ -]?att\w+|\battention (mask|backend|kernel)|\bsdpa\b",
    ),
    Cause(
        "cuda_graph",
        PROGRAM,
        "an operation is not permitted during CUDA graph capture",
        "first run without CUDA graphs (enable_cuda_graph=False, --cuda-graph-impl none); then look for operations "
        "that synchronize",
        (
            *phrases("when stream is capturing", "cudaerrorstreamcapture", "captures_underway"),
            Pattern("during capture", r"(operation|failed|not permitted|invalidated)", LIKELY),
            Pattern("cuda graph", r"(fail|error|cannot|not supported|illegal)", LIKELY),
        ),
        follows=("gpu_out_of_memory",),
        message_topics=r"\bcuda ?graphs?\b",
    ),
    Cause(
        "cuda_after_fork",
        PROGRAM,
        "a forked process used CUDA, which was initialized in its parent",
        'use the multiprocessing start method "spawn" for data workers that use the GPU, or keep them on the CPU',
        (
            *phrases("re-initialize cuda in forked subprocess", "poison_fork"),
            Pattern("cudaerrorinitializationerror", sure=HINT),
        ),
    ),
    Cause(
        "node_failed",
        GROUND,
        "a node failed during the job: Slurm lost contact with it, or it went down",
        "resume with `recipes submit NAME --resume RUN`: Slurm allocates another node; `sinfo -R` shows why the node "
        "went down",
        (
            Pattern("due to node failure", any_level=True),
            *phrases("node_fail", "nodes are not responding", "soft lockup", sure=LIKELY, any_level=True),
            *phrases("node failure on", "kernel panic"),
            *phrases("zero bytes were transmitted or received", "lost connection to node", sure=LIKELY),
            *phrases("the node it was running on is dead", sure=LIKELY),
            Pattern(
                "node",
                r"srun: error: Node failure|Node \S+ (has failed(?! to)|is down|not responding)",
                LIKELY,
                any_level=True,
            ),
            Pattern("was evicted", r"node|pod", LIKELY),
        ),
    ),
    Cause(
        "rank_crashed",
        ENDING,
        "a rank crashed in compiled code (for example, with a segmentation fault)",
        "PYTHONFAULTHANDLER=1 prints the Python stack, and a core dump (`ulimit -c unlimited`) contains the native "
        "stack; the usual reason is libraries from different releases: `recipes doctor`",
        (
            *phrases("segmentation fault", "double free or corruption", "stack smashing detected"),
            *phrases("corrupted size vs. prev_size", "free(): invalid pointer"),
            Pattern("sigsegv", r"SIGSEGV(?! or other unexpected errors)"),
            Pattern("caught signal 11", any_level=True),
            Pattern("exited on signal", r"exited on signal (4|8|11)\b"),
            Pattern("code", r"code\s*[:=]?\s*(-(11|4|7|8)|13[256]|139)\b"),
            Pattern("bus error", r"(tasks? [\d,-]+: Bus error|^Bus error|Fatal Python error: Bus error|\(SIGBUS\))"),
            Pattern("illegal instruction", r"tasks? [\d,-]+: Illegal instruction|^Illegal instruction|SIGILL"),
            Pattern("fatal python error", r"Fatal Python error: (?!Aborted|none_dealloc)", LIKELY),
            Pattern("floating point exception", r"tasks?|core dumped"),
            Pattern("malloc", r"(memory corruption|corrupted top size|unaligned)"),
        ),
        follows=("shared_memory_full", "hang", "nccl_timeout", "cancelled", "time_limit", "preempted"),
    ),
    Cause(
        "rank_aborted",
        ECHO,
        "a rank aborted (SIGABRT) after an error in this or another rank",
        "read the lines above this message and the logs of the other ranks: `recipes logs RUN --all`",
        (
            Pattern("exitcode", r"exitcode\s*[:=]\s*-6\b", LIKELY),
            *phrases("sigabrt", "fatal python error: aborted", "exit code 134", sure=LIKELY),
            Pattern("aborted", r"(tasks? [\d,-]+|Signal): Aborted|^Aborted( \(core dumped\))?$|\d+ Aborted ", LIKELY),
            Pattern("terminate called", r"terminate called (after throwing|without an active)", HINT),
        ),
        follows=(
            *("nccl_timeout", "rank_crashed", "rank_killed", "hang", "connection_lost", "nccl_remote_gone"),
            "terminated",
        ),
    ),
    Cause(
        "silent_corruption",
        GROUND,
        "values that should be equal on several ranks differ, or a step is not reproducible: a GPU may compute "
        "wrong results",
        "exclude the node and repeat the step on other GPUs; test the node with `dcgmi diag -r 4` and `recipes cluster "
        "health PROFILE`",
        (
            *phrases("not reproducible on a different gpu", "possible persistent error", "possible transient error"),
            *phrases("silent data corruption"),
            Pattern("hash", r"(param|weight)\w* (hash|checksum)\w* (mismatch|differ|not match)"),
            Pattern(
                "replica",
                r"(weights|parameters|gradients).*(differ|diverge|mismatch|not equal).*replica|replicas? (differ"
                r"|disagree|are not (equal|identical))",
            ),
            Pattern("inconsistent", r"(weights|parameters|gradients) are inconsistent", LIKELY),
        ),
    ),
)
