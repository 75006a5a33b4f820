"""`recipes cluster`: write and check cluster profiles, and test nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.verbs import CommandGroup
from superpod.common import output_file
from superpod.errors import UserError, counted
from superpod.slurm.profiles import profiles
from superpod.slurm.submission import connection

if TYPE_CHECKING:
    from superpod.slurm.profiles.profile_checks import Finding
    from superpod.slurm.submission.connection import Connection

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Write and check cluster profiles, and test nodes.")
Profile = Annotated[str, typer.Argument(help="Cluster profile: a built-in one such as dgx_h100, or a TOML file.")]
NodeList = Annotated[str, typer.Option("--nodes", help="Slurm hostlist, such as node[1-4]. Default: all idle nodes.")]


@app.command()
def check(
    profile: Profile,
    node: Annotated[bool, typer.Option("--node/--no-node", help="Also check a node, in a job of seconds.")] = True,
) -> None:
    """Compare a profile with its cluster and one of the nodes; print the errors and how to correct them."""
    from superpod.slurm.preflight import preflight
    from superpod.slurm.profiles import checked_profiles, live_cluster, node_probe
    from superpod.slurm.submission.submit import ranks_python

    cluster = profiles.load(profile)
    slurm = connection.connect(cluster)
    paths, python = preflight.paths_to_check(cluster), "" if cluster.container.image else ranks_python(cluster)
    live = live_cluster.query_cluster(slurm, cluster, cluster.folders.runs, paths, python)
    _refuse(preflight.profile_findings(cluster, live))
    partition = cluster.slurm.partition or live.default_partition
    sentence = f"{cluster.name} matches its cluster: {counted(len(live.nodes_in(partition)), 'node')} in {partition}"
    unchecked = f"not checked without a node: {', '.join(node_probe.node_only_keys())}"
    if not node:
        print(f"ok: {sentence}\n{unchecked}")
        return
    try:
        facts = node_probe.probe_node(slurm, cluster, paths, python)
    except node_probe.NoNodeAvailable as error:
        print(f"ok: {sentence}\n{unchecked}\n  because {error}")
        return
    _refuse(node_probe.findings(cluster, facts))
    checked_profiles.mark_checked(cluster)
    print(f"ok: {sentence}, and {facts.host}")
    unchecked = "times and limits in [slurm], [chain] and [health]"
    if cluster.container.image:
        unchecked = f"contents of the container image, which rank 0 of each run checks; {unchecked}"
    print(f"not checked: {unchecked}")


def _refuse(findings: list[Finding]) -> None:
    """Print the findings and exit 2 if there are any."""
    for finding in findings:
        print(finding.message + (f"\n  next: {finding.hint}" if finding.hint else ""))
    if findings:
        raise typer.Exit(2)


@app.command()
def init(
    like: Annotated[str, typer.Option("--like", help="Built-in profile to start from.")] = "",
    to: Annotated[Path, typer.Option("--to", help="TOML file to write.")] = Path("cluster.toml"),
    host: Annotated[str, typer.Option("--host", help="Login node to connect to by SSH. Default: this machine.")] = "",
    runs: Annotated[str, typer.Option("--runs", help="Shared folder for the run folders.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a profile with the values that Slurm and a node report: partition, account, GPUs, limits and network."""
    from superpod.slurm.profiles import profile_init

    output_file.check_new(to, "--to", force=force)
    slurm = connection.SshConnection(host) if host else connection.Connection()
    text = profile_init.render_profile(slurm, like=like, host=host, runs=runs)
    profiles.parse(text, str(to))
    output_file.write(to, text, "--to")
    print(f"wrote {to}\n  next: review it, then run: recipes cluster check {to}")


@app.command()
def health(profile: Profile, nodes: NodeList = "") -> None:
    """Check GPUs, NVLink, InfiniBand, clocks, disk, system time and an all-reduce of nodes; exit 1 if a check fails."""
    from superpod.slurm.node_health import check_nodes

    cluster = profiles.load(profile)
    slurm = connection.connect(cluster)
    verdicts = check_nodes(slurm, cluster, _nodes(slurm, cluster.slurm.partition, nodes))
    for verdict in sorted(verdicts, key=lambda v: (v.node, v.check)):
        print(f"{verdict.node:12} {verdict.check:12} {verdict.state:5} {verdict.detail}")
    bad = sorted({v.node for v in verdicts if v.state == "bad"} - {"all"})
    if bad:
        print(f'bad: {", ".join(bad)}\n  next: exclude these nodes: slurm.options = ["--exclude={",".join(bad)}"]')
    if any(v.state == "bad" for v in verdicts):
        raise typer.Exit(1)


@app.command()
def bisect(
    profile: Profile,
    nodes: NodeList = "",
    mib: Annotated[int, typer.Option("--mib", help="Message size in MiB; 0 selects a size for the transport.")] = 0,
    transport: Annotated[str, typer.Option("--transport", help="nccl, ib, gloo or tcp. Default: the fastest.")] = "",
) -> None:
    """Measure the bandwidth between all pairs of nodes to find slow nodes and links; exit 1 if a node is slow."""
    from superpod.slurm.slow_nodes import bisect as measure

    cluster = profiles.load(profile)
    slurm = connection.connect(cluster)
    result = measure(slurm, cluster, _nodes(slurm, cluster.slurm.partition, nodes), mib, transport)
    for pair in sorted(result.pairs, key=lambda p: p.gb_s):
        print(f"{pair.nodes[0]:12} {pair.nodes[1]:12} {pair.gb_s:8.3g} GB/s  {pair.how}")
    print(f"transport: {result.transport}" + (f" ({result.why})" if result.why else ""))
    if result.transport in ("tcp", "gloo") and cluster.network.kind in ("infiniband", "roce"):
        print(f"  TCP does not use the {cluster.network.kind} ports of training, so a slow port is not detected")
    if result.slow:
        print(f"slow: {', '.join(result.slow)}")
        raise typer.Exit(1)
    print(f"no slow node found in {counted(len(result.pairs), 'pair')}")


def _nodes(slurm: Connection, partition: str, names: str) -> list[str]:
    """Return the nodes of a hostlist, or for "" all idle nodes of the partition. Raises UserError if none is idle."""
    if names:
        return slurm.run(["scontrol", "show", "hostnames", names]).split()
    partition_options = ["-p", partition] if partition else []
    idle_nodes = sorted(set(slurm.run(["sinfo", "-h", "-N", *partition_options, "-t", "idle", "-o", "%N"]).split()))
    if not idle_nodes:
        raise UserError("no node is idle", "select nodes with --nodes, or try again later")
    return idle_nodes
