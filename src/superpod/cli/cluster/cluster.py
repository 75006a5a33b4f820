"""`recipes cluster check | init | health | bisect`: a profile and its live cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.verbs import Verbs
from superpod.common import output_file
from superpod.errors import UserError, counted

if TYPE_CHECKING:
    from superpod.slurm.profiles.profile_checks import Finding
    from superpod.slurm.submission.connection import Connection

app = typer.Typer(cls=Verbs, no_args_is_help=True)
Profile = Annotated[str, typer.Argument(help="A profile: dgx_h100, ..., or the path of a TOML file.")]
NodeList = Annotated[
    str, typer.Option("--nodes", help="Nodes as Slurm writes them: node[1-4]; default: all idle ones.")
]


@app.command()
def check(
    profile: Profile,
    node: Annotated[bool, typer.Option("--node/--no-node", help="Ask a node too, by a job of some seconds.")] = True,
) -> None:
    """Compare a profile with the live cluster and one of its nodes: what would fail, and what to write instead."""
    from superpod.slurm.preflight import preflight
    from superpod.slurm.profiles import checked_profiles, live_cluster, node_probe, profiles
    from superpod.slurm.submission import connection
    from superpod.slurm.submission.submit import ranks_python

    cluster = profiles.load(profile)
    slurm = connection.connect(cluster)
    paths, python = preflight.paths(cluster), "" if cluster.container.image else ranks_python(cluster)
    live = live_cluster.query_cluster(slurm, cluster, cluster.folders.runs, paths, python)
    _refuse(preflight.profile_findings(cluster, live))
    partition = cluster.slurm.partition or live.default_partition
    sentence = (
        f"{cluster.name} agrees with its cluster: {counted(len(live.nodes_in(partition)), 'node')} in {partition}"
    )
    unproven = f"not proven, as only a node can prove them: {', '.join(node_probe.only_a_node())}"
    if not node:
        print(f"ok: {sentence}\n{unproven}")
        return
    try:
        facts = node_probe.probe_node(slurm, cluster, paths, python)
    except node_probe.NoNodeAvailable as error:
        print(f"ok: {sentence}\n{unproven}\n  because {error}")
        return
    _refuse(node_probe.findings(cluster, facts))
    checked_profiles.mark_checked(cluster)
    print(f"ok: {sentence}, and with {facts.host}")
    left = (
        "what the image holds, which a run's first rank proves, and choices" if cluster.container.image else "choices"
    )
    print(f"not proven: {left} (times and limits of slurm, chain and health)")


def _refuse(findings: list[Finding]) -> None:
    for finding in findings:
        print(finding.message + (f"\n  next: {finding.hint}" if finding.hint else ""))
    if findings:
        raise typer.Exit(2)


@app.command()
def init(
    like: Annotated[str, typer.Option("--like", help="The shipped profile to start from.")] = "",
    to: Annotated[Path, typer.Option("--to", help="Where to write it.")] = Path("cluster.toml"),
    host: Annotated[str, typer.Option("--host", help="The login node, reached by SSH; default: this machine.")] = "",
    runs: Annotated[str, typer.Option("--runs", help="The shared folder for runs.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a profile by asking Slurm and a node: partition, account, GPUs, limits, network."""
    from superpod.slurm.profiles import profile_init, profiles
    from superpod.slurm.submission import connection

    output_file.check_new(to, "--to", force=force)
    slurm = connection.SshConnection(host) if host else connection.Connection()
    text = profile_init.render_profile(slurm, like=like, host=host, runs=runs)
    profiles.parse(text, str(to))
    output_file.write(to, text, "--to")
    print(f"wrote {to}; read it, then: recipes cluster check {to}")


@app.command()
def health(profile: Profile, nodes: NodeList = "") -> None:
    """Check nodes: GPUs, NVLink, InfiniBand, clocks, disk, time, and a short all-reduce."""
    from superpod.slurm.health import check_nodes
    from superpod.slurm.profiles import profiles
    from superpod.slurm.submission import connection

    cluster = profiles.load(profile)
    slurm = connection.connect(cluster)
    verdicts = check_nodes(slurm, cluster, _nodes(slurm, cluster.slurm.partition, nodes))
    for verdict in sorted(verdicts, key=lambda v: (v.node, v.check)):
        print(f"{verdict.node:12} {verdict.check:12} {verdict.state:5} {verdict.detail}")
    bad = sorted({v.node for v in verdicts if v.state == "bad"} - {"all"})
    if bad:
        print(f'bad: {", ".join(bad)}\n  next: keep jobs away: slurm.options = ["--exclude={",".join(bad)}"]')
    if any(v.state == "bad" for v in verdicts):
        raise typer.Exit(1)


@app.command()
def bisect(
    profile: Profile,
    nodes: NodeList = "",
    mib: Annotated[int, typer.Option("--mib", help="MiB of a measurement; 0 = enough for the transport.")] = 0,
    transport: Annotated[
        str, typer.Option("--transport", help="nccl, ib, gloo or tcp; default: the best that all nodes have.")
    ] = "",
) -> None:
    """Find a slow node or link: NCCL, ib_write_bw or TCP between every pair of nodes, a round of pairs at a time."""
    from superpod.slurm.bisect import bisect as measure
    from superpod.slurm.profiles import profiles
    from superpod.slurm.submission import connection

    cluster = profiles.load(profile)
    slurm = connection.connect(cluster)
    result = measure(slurm, cluster, _nodes(slurm, cluster.slurm.partition, nodes), mib, transport)
    for pair in sorted(result.pairs, key=lambda p: p.gb_s):
        print(f"{pair.nodes[0]:12} {pair.nodes[1]:12} {pair.gb_s:8.3g} GB/s  {pair.how}")
    print(f"transport: {result.transport}" + (f" ({result.why})" if result.why else ""))
    if result.transport in ("tcp", "gloo") and cluster.network.kind in ("infiniband", "roce"):
        print(f"  TCP does not take the {cluster.network.kind} ports of training: a slow one of them is not seen here")
    print(f"slow: {', '.join(result.slow)}" if result.slow else f"no node stands out over {len(result.pairs)} pairs")
    if result.slow:
        raise typer.Exit(1)


def _nodes(slurm: Connection, partition: str, names: str) -> list[str]:
    if names:
        return slurm.run(["scontrol", "show", "hostnames", names]).split()
    where = ["-p", partition] if partition else []
    idle = sorted(set(slurm.run(["sinfo", "-h", "-N", *where, "-t", "idle", "-o", "%N"]).split()))
    if not idle:
        raise UserError("no node is idle", "name nodes with --nodes, or wait")
    return idle
