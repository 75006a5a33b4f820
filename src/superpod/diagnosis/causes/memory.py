"""Causes: GPU memory and host memory."""

from __future__ import annotations

from superpod.diagnosis.causes.table import CERTAIN, ENDING, GROUND, HINT, LIKELY, PROGRAM, Cause, Pattern, phrases

CAUSES = (
    Cause(
        "gpu_out_of_memory",
        PROGRAM,
        "the rank needs more GPU memory than the GPU has",
        "`recipes memory NAME --nodes N` shows the memory of each rank by category; `recipes check` suggests "
        "changes that free enough: higher tp, pp or cp, with=full_recompute, with=offload_optimizer",
        (
            *phrases("cuda out of memory", "cuda error: out of memory", "cuda_error_out_of_memory"),
            *phrases("no available memory for the cache blocks"),
            Pattern("outofmemoryerror", r"(cuda|hip)\.?OutOfMemoryError|torch\.OutOfMemoryError|^OutOfMemoryError"),
            Pattern("cublas_status_alloc_failed", sure=LIKELY),
            Pattern("kv cache", r"larger than|not enough|insufficient|exceeds", LIKELY),
            Pattern("cuda failure", r"Cuda failure (2|'?out of memory)"),
            Pattern(
                "out of memory",
                r"Triton Error|Internal: out of|cudaErrorMemoryAllocation|cudaMalloc\w* failed",
            ),
            Pattern("resource_exhausted", r"\balloc|memory"),
            Pattern("out of memory", r"\b(HIP|NPU|XPU|HPU|MUSA) out of memory"),
        ),
    ),
    Cause(
        "gpu_memory_fragmented",
        PROGRAM,
        "GPU memory is fragmented: PyTorch has more reserved but unallocated memory than the request needed",
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True ([env] in the profile), except with CUDA graphs",
        (),  # detected from the sizes in an out-of-memory message: see oom.py
    ),
    Cause(
        "gpu_memory_taken",
        PROGRAM,
        "another process uses the GPU or its memory",
        "run `nvidia-smi` on the node to find the process; kill it if it is left from an earlier job, or request "
        "exclusive nodes (--exclusive)",
        # Memory of other processes is detected from the sizes in an out-of-memory message: see oom.py.
        (Pattern("is/are busy or unavailable", sure=LIKELY), Pattern("compute mode", r"exclusive", LIKELY)),
    ),
    Cause(
        "host_out_of_memory",
        GROUND,
        "the node ran out of host memory, and the kernel or Slurm killed a process",
        'request all memory of the node (slurm.mem = "0" in the profile), or use fewer data workers or a '
        "smaller shuffle buffer",
        (
            Pattern("oom", r"oom[-_]kill(er)?( event|:|\(s\))|invoked oom-killer|oom_reaper:"),
            *phrases("out of memory: killed process", "memory cgroup out of memory", "ray.exceptions.outofmemoryerror"),
            *phrases("oomkilled", "low on resource: memory", any_level=True),
            Pattern("out of memory", r"tasks? [\d,-]+: Out Of Memory"),
            Pattern("out_of_memory", r"\b(State|ended|JobState|exit)\S*\s*[=:(]?\s*OUT_OF_MEMORY|OUT_OF_MEMORY\)?$"),
            Pattern("exceeded", r"Exceeded (job|step) memory limit"),
            Pattern("not enough memory", r"DefaultCPUAllocator: (not enough memory|can't allocate memory)"),
            Pattern("can't allocate memory", r"DefaultCPUAllocator"),
            Pattern("cannot allocate memory", r"Errno 12\]|fork: |mmap|OSError", LIKELY),
            Pattern("memoryerror", r"(^|\s)(numpy\S*\.)?_?(Array)?MemoryError\b"),
            Pattern("std::bad_alloc", sure=LIKELY),
            Pattern("unable to allocate", r"Unable to allocate [\d.]+ .iB for an array", sure=LIKELY),
            Pattern("dataloader worker", r"is killed by signal: Killed", LIKELY),
            Pattern("raylet", r"OutOfMemory|low on memory", LIKELY),
            Pattern("low on memory", r"(node|task|worker|actor)\w*\b.*\bkilled|killed\b.*\blow on memory"),
            Pattern("memory pressure", r"killed due to memory pressure"),
        ),
    ),
    Cause(
        "shared_memory_full",
        GROUND,
        "/dev/shm is too small for the data workers or for NCCL",
        "enlarge it: --shm-size=16g or --ipc=host (Docker), an emptyDir with medium: Memory on /dev/shm (Kubernetes), "
        "or the /dev/shm of the node (enroot, pyxis); otherwise, use fewer data workers",
        (
            *phrases("insufficient shared memory", "out of shared memory", "failed to extend /dev/shm"),
            Pattern("bus error", r"DataLoader worker .* killed by signal: Bus error"),
            # SIGBUS: a mapped page could not be allocated. Ranks map /dev/shm for NCCL and for data workers.
            Pattern("caught signal 7", sure=LIKELY, any_level=True),
            Pattern(
                "shared memory segment",
                r"(error|fail)\w* while creating shared memory|ftruncate|posix_fallocate",
                sure=LIKELY,
            ),
            Pattern("unable to open shared memory object", r"No space left|\(28\)"),
            Pattern("torch_shm_manager", r"error|fail", LIKELY),
            Pattern("unable to write to file </torch_", sure=LIKELY),
            Pattern("shm_open", r"fail|error", LIKELY),
            Pattern("/dev/shm", r"No space left on device"),
            # POSIX semaphores and shared memory are files in /dev/shm, so it is not a disk that is full.
            Pattern(
                "no space left on device", frame=r"multiprocessing\S*(synchronize|shared_memory|heap|resource_tracker)"
            ),
        ),
        follows=("host_out_of_memory",),
    ),
    Cause(
        "open_files_limit",
        GROUND,
        "the process has reached its limit on open files",
        "raise it with `ulimit -n 65536` before the ranks start (LimitNOFILE of slurmd), or call "
        "torch.multiprocessing.set_sharing_strategy('file_system') if there are many workers",
        (Pattern("too many open files"), Pattern("received 0 items of ancdata", sure=LIKELY), Pattern("emfile")),
    ),
    Cause(
        "process_limit",
        GROUND,
        "no more threads or processes can be created: the limit of the user or of the job's cgroup is reached",
        "raise `ulimit -u` or TasksMax/pids.max of the job, set OMP_NUM_THREADS, or use fewer data workers",
        (
            *phrases("can't start new thread", "thread creation failed", "pthread_create failed", "blas_thread_init"),
            Pattern("resource temporarily unavailable", r"fork|thread|Errno 11|clone|pthread_create"),
        ),
    ),
    Cause(
        "locked_memory_limit",
        GROUND,
        "InfiniBand cannot register memory: the limit on locked memory is too low",
        "inside the job, `ulimit -l` must print unlimited: set LimitMEMLOCK=infinity for slurmd, or --ulimit "
        "memlock=-1 for Docker; `recipes cluster health PROFILE` checks this",
        (
            *phrases("ibv_reg_mr", "ibv_create_cq", pattern=r"(Cannot allocate memory|fail)"),
            Pattern("ibv_create_qp", r"(Cannot allocate memory|fail)", LIKELY),
            Pattern("memlock", r"too (low|small)|RLIMIT_MEMLOCK|insufficient|limit", LIKELY, alone=False),
            Pattern("ibv_reg_dmabuf_mr", r"fail|error", LIKELY),
        ),
    ),
    Cause(
        "rank_killed",
        ENDING,
        "a rank was killed by SIGKILL for an unknown reason: there is no record of who sent the signal",
        "check if the node ran out of memory (`dmesg -T | grep -i oom`, `sacct -j JOB -o MaxRSS`); otherwise, resume",
        (
            Pattern("killed", r"^srun: error: \S+: tasks? [\d,-]+: Killed", LIKELY),
            Pattern("code", r"code\s*[:=]?\s*(-9|137)\b", LIKELY),
            Pattern("sigkill", r"(Signal 9 \(SIGKILL\)|signal SIGKILL)", LIKELY),
            Pattern("killed", r"^(\S+: line \d+:\s+\d+ )?Killed\b", HINT),
            *phrases("exited on signal 9", "worker unexpectedly exits", sure=LIKELY),
            Pattern("signal: killed", r"DataLoader (worker|process)", LIKELY),
            Pattern(
                "killed",
                r"^\[\d+\][+-]?\s+(\d+\s+)?killed\b|^\S*(python|torchrun|accelerate|deepspeed)\S* .*\bKilled$",
                LIKELY,
            ),
            Pattern("died with", r"died with <?Signals\.SIGKILL", LIKELY),
            # Ray lists every way in which a worker may end; the first is the kernel's out-of-memory killer.
            Pattern("died unexpectedly", r"(actor|worker|task)", LIKELY),
            Pattern("unexpected system error", r"worker died or was killed", LIKELY),
            Pattern("abruptly", r"process\w*\b.*\b(terminated abruptly|abruptly died)", LIKELY),
        ),
        follows=("cancelled", "time_limit", "preempted", "node_failed", "hang"),
    ),
    Cause(
        "gpu_pinned_memory",
        PROGRAM,
        "the GPU driver could not pin host memory",
        "use fewer data workers with pin_memory, or request more host memory",
        (
            Pattern("cudahostalloc", r"fail|error|out of memory"),
            Pattern("memory", r"pin[_ ]memory.*(thread exited|CUDA error)", CERTAIN),
        ),
        follows=("gpu_out_of_memory", "gpu_illegal_access", "gpu_ecc", "gpu_lost", "gpu_assert"),
    ),
)
