"""Causes: GPU memory and host memory."""

from __future__ import annotations

from superpod.diagnosis.causes.table import CERTAIN, GROUND, HINT, LIKELY, PROGRAM, Cause, Sign

CAUSES = (
    Cause(
        "gpu_out_of_memory",
        PROGRAM,
        "the rank needs more GPU memory than the GPU has",
        "`recipes memory NAME --nodes N` shows the memory of each rank by category; `recipes check` names "
        "changes that free enough: higher tp, pp or cp, with=full_recompute, with=offload_optimizer",
        (
            Sign("cuda out of memory"),
            Sign("outofmemoryerror", r"(cuda|hip)\.?OutOfMemoryError|torch\.OutOfMemoryError|^OutOfMemoryError"),
            Sign("cuda error: out of memory"),
            Sign("cuda_error_out_of_memory"),
            Sign("cublas_status_alloc_failed", sure=LIKELY),
            Sign("kv cache", r"larger than|not enough|insufficient|exceeds", LIKELY),
            Sign("no available memory for the cache blocks"),
            Sign("cuda failure", r"Cuda failure (2|'?out of memory)"),
            Sign(
                "out of memory",
                r"RESOURCE_EXHAUSTED|Triton Error|Internal: out of|cudaErrorMemoryAllocation|cudaMalloc\w* failed",
            ),
            Sign("out of memory", r"\b(HIP|NPU|XPU|HPU|MUSA) out of memory"),
        ),
    ),
    Cause(
        "gpu_memory_fragmented",
        PROGRAM,
        "the GPU memory is fragmented: PyTorch has reserved but not allocated more than the request needed",
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True ([env] of the profile), except with CUDA graphs",
        (),  # detected from the sizes in an out-of-memory message: see oom.py
    ),
    Cause(
        "gpu_memory_taken",
        PROGRAM,
        "another process uses the GPU or its memory",
        "find the process with `nvidia-smi` on that node: kill what an earlier job left behind, or request "
        "exclusive nodes (--exclusive)",
        # Memory of other processes is detected from the sizes in an out-of-memory message: see oom.py.
        (Sign("is/are busy or unavailable", sure=LIKELY), Sign("compute mode", r"exclusive", LIKELY)),
    ),
    Cause(
        "host_out_of_memory",
        GROUND,
        "the node ran out of host memory, and the kernel or Slurm killed a process",
        'request all memory of the node (slurm.mem = "0" in the profile), or use fewer data workers or a '
        "smaller shuffle buffer",
        (
            Sign("oom", r"oom[-_]kill(er)?( event|:|\(s\))|invoked oom-killer|oom_reaper:"),
            Sign("out of memory: killed process"),
            Sign("memory cgroup out of memory"),
            Sign("oomkilled", any_level=True),
            Sign("out of memory", r"tasks? [\d,-]+: Out Of Memory"),
            Sign("out_of_memory", r"\b(State|ended|JobState|exit)\S*\s*[=:(]?\s*OUT_OF_MEMORY|OUT_OF_MEMORY\)?$"),
            Sign("exceeded", r"Exceeded (job|step) memory limit"),
            Sign("not enough memory", r"DefaultCPUAllocator: (not enough memory|can't allocate memory)"),
            Sign("can't allocate memory", r"DefaultCPUAllocator"),
            Sign("cannot allocate memory", r"Errno 12\]|fork: |mmap|OSError", LIKELY),
            Sign("memoryerror", r"(^|\s)(numpy\S*\.)?_?(Array)?MemoryError\b"),
            Sign("std::bad_alloc", sure=LIKELY),
            Sign("unable to allocate", r"Unable to allocate [\d.]+ .iB for an array", sure=LIKELY),
            Sign("dataloader worker", r"is killed by signal: Killed", LIKELY),
            Sign("raylet", r"OutOfMemory|low on memory", LIKELY),
            Sign("ray.exceptions.outofmemoryerror"),
            Sign("low on memory", r"(node|task|worker|actor)\w*\b.*\bkilled|killed\b.*\blow on memory"),
            Sign("low on resource: memory", any_level=True),
            Sign("memory pressure", r"killed due to memory pressure"),
        ),
    ),
    Cause(
        "shared_memory_full",
        GROUND,
        "/dev/shm is too small for the data workers or for NCCL",
        "enlarge it in the container: --shm-size=16g or --ipc=host (Docker), an emptyDir with medium: Memory "
        "on /dev/shm (Kubernetes); enroot and pyxis use the node's /dev/shm; otherwise use fewer data workers",
        (
            Sign("insufficient shared memory"),
            Sign("out of shared memory"),
            Sign("bus error", r"DataLoader worker .* killed by signal: Bus error"),
            # SIGBUS: a mapped page has no memory behind it. Ranks map /dev/shm for NCCL and for data workers.
            Sign("caught signal 7", sure=LIKELY, any_level=True),
            Sign(
                "shared memory segment",
                r"(error|fail)\w* while creating shared memory|ftruncate|posix_fallocate",
                sure=LIKELY,
            ),
            Sign("unable to open shared memory object", r"No space left|\(28\)"),
            Sign("torch_shm_manager", r"error|fail", LIKELY),
            Sign("unable to write to file </torch_", sure=LIKELY),
            Sign("shm_open", r"fail|error", LIKELY),
            Sign("/dev/shm", r"No space left on device"),
            Sign("failed to extend /dev/shm"),
            # POSIX semaphores and shared memory are files of /dev/shm: no disk is full.
            Sign(
                "no space left on device", frame=r"multiprocessing\S*(synchronize|shared_memory|heap|resource_tracker)"
            ),
        ),
        follows=("host_out_of_memory",),
    ),
    Cause(
        "open_files_limit",
        GROUND,
        "the process has reached its limit of open files",
        "raise it with `ulimit -n 65536` before the ranks start (LimitNOFILE of slurmd), or call "
        "torch.multiprocessing.set_sharing_strategy('file_system') if there are many workers",
        (Sign("too many open files"), Sign("received 0 items of ancdata", sure=LIKELY), Sign("emfile")),
    ),
    Cause(
        "process_limit",
        GROUND,
        "no further thread or process can be created: a limit of the user or of the job's cgroup is reached",
        "raise `ulimit -u` or TasksMax/pids.max of the job, set OMP_NUM_THREADS, or use fewer data workers",
        (
            Sign("can't start new thread"),
            Sign("thread creation failed"),
            Sign("resource temporarily unavailable", r"fork|thread|Errno 11|clone|pthread_create"),
            Sign("pthread_create failed"),
            Sign("blas_thread_init"),
        ),
    ),
    Cause(
        "locked_memory_limit",
        GROUND,
        "InfiniBand cannot register memory: the limit of locked memory is too low",
        "`ulimit -l` must print unlimited inside the job: set LimitMEMLOCK=infinity for slurmd or --ulimit "
        "memlock=-1 for Docker; `recipes cluster health PROFILE` checks it",
        (
            Sign("ibv_reg_mr", r"(Cannot allocate memory|fail)"),
            Sign("ibv_create_cq", r"(Cannot allocate memory|fail)"),
            Sign("ibv_create_qp", r"(Cannot allocate memory|fail)", LIKELY),
            Sign("memlock", r"too (low|small)|RLIMIT_MEMLOCK|insufficient|limit", LIKELY, alone=False),
            Sign("ibv_reg_dmabuf_mr", r"fail|error", LIKELY),
        ),
    ),
    Cause(
        "rank_killed",
        1,
        "a rank was killed by SIGKILL; the cause is unknown, since nothing recorded who sent the signal",
        "check the node's kernel log (`dmesg -T | grep -i oom`) and sacct -o MaxRSS for lack of memory; "
        "otherwise resume",
        (
            Sign("killed", r"^srun: error: \S+: tasks? [\d,-]+: Killed", LIKELY),
            Sign("code", r"code\s*[:=]?\s*(-9|137)\b", LIKELY),
            Sign("sigkill", r"(Signal 9 \(SIGKILL\)|signal SIGKILL)", LIKELY),
            Sign("killed", r"^(\S+: line \d+:\s+\d+ )?Killed\b", HINT),
            Sign("exited on signal 9", sure=LIKELY),
            Sign("signal: killed", r"DataLoader (worker|process)", LIKELY),
            Sign(
                "killed",
                r"^\[\d+\][+-]?\s+(\d+\s+)?killed\b|^\S*(python|torchrun|accelerate|deepspeed)\S* .*\bKilled$",
                LIKELY,
            ),
            Sign("died with", r"died with <?Signals\.SIGKILL", LIKELY),
            # Ray lists every way in which a worker may end; the first is the kernel's out-of-memory killer.
            Sign("died unexpectedly", r"(actor|worker|task)", LIKELY),
            Sign("unexpected system error", r"worker died or was killed", LIKELY),
            Sign("worker unexpectedly exits", sure=LIKELY),
            Sign("abruptly", r"process\w*\b.*\b(terminated abruptly|abruptly died)", LIKELY),
        ),
        follows=("cancelled", "time_limit", "preempted", "node_failed", "hang"),
    ),
    Cause(
        "gpu_pinned_memory",
        PROGRAM,
        "the GPU driver could not pin host memory",
        "use fewer data workers with pin_memory, or request more host memory",
        (
            Sign("cudahostalloc", r"fail|error|out of memory"),
            Sign("memory", r"pin[_ ]memory.*(thread exited|CUDA error)", CERTAIN),
        ),
        follows=("gpu_out_of_memory", "gpu_illegal_access", "gpu_ecc", "gpu_lost", "gpu_assert"),
    ),
)
