"""Test a model, GPU, cluster and check of a user collection on the command line."""

import json
import os
import re
import subprocess
import sys

import pytest

from superpod.common import collection
from tests.extending.collection import write_collection

MINI = "acme_mini_pretrain_x100_bf16"


@pytest.fixture
def cli(acme, recipes_cli):
    """Return a function that runs a command with the collection, and checks its exit code."""

    def call(*words, code=0, **options):
        done = recipes_cli("--recipes", acme, *words, **options)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    return call


def test_list_shows_recipes_of_the_collection(cli):
    recipes = {recipe["name"]: recipe for recipe in json.loads(cli("list", "--json"))}
    assert len(recipes) > 5000
    assert {name for name, recipe in recipes.items() if "acme" in name or recipe["gpu"] == "x100"} == {
        MINI,
        "acme_mini_pretrain_x100_fp8cs",
        "acme_hf_pretrain_x100_bf16",
        "acme_hf_sft_h100_bf16",
        "llama3_8b_pretrain_x100_bf16",
    }
    assert recipes[MINI]["gpus_per_node"] == 4
    assert recipes[MINI]["title"].startswith("Acme Mini: a small Llama")
    assert recipes["acme_hf_sft_h100_bf16"]["gpus_per_node"] == 8
    assert recipes[MINI]["layouts"]["2"]["pp"] == 2


def test_list_without_the_collection(recipes_cli):
    assert "no recipe name" in recipes_cli("list", "acme").stderr
    assert "there is no node 'x100'" in recipes_cli("plan", "llama3_8b", "--gpu=x100", "--gpus=8").stderr


@pytest.mark.parametrize("model", ["acme_mini", "acme_hf", "llama3_8b"])
def test_plan_on_a_user_gpu(cli, model):
    plan = json.loads(cli("plan", model, "--gpu=x100", "--nodes=4", "--seq=2048", "--gbs=64", "--json"))
    assert plan["candidates"] > 100
    assert plan["layouts"][0]["step_time_s"] > 0


def test_check(cli):
    assert "ok: legal" in cli("check", MINI)
    assert "legal" in cli("check", "llama3_8b_pretrain_x100_bf16")
    assert cli("check", MINI, "--layout=tp=3", code=2)


def test_plan_writes_into_the_collection(own, recipes_cli):
    words = ("plan", "acme_mini", "--gpu=x100", "--nodes=4", "--seq=2048", "--gbs=64", "--write")
    before = (own / "layouts" / "acme_mini.toml").read_text()
    done = recipes_cli("--recipes", own, *words)
    assert done.returncode == 0, done.stderr
    after = (own / "layouts" / "acme_mini.toml").read_text()
    assert after != before
    listed = json.loads(recipes_cli("--recipes", own, "list", MINI, "--json").stdout)
    assert sorted(map(int, listed[0]["layouts"])) == [1, 2, 4]
    assert listed[0]["layouts"]["2"]["pp"] == 2


def test_plan_creates_layout_file_in_the_collection(own, recipes_cli):
    (own / "layouts" / "llama3_8b.toml").unlink()
    words = ("plan", "llama3_8b", "--gpu=x100", "--nodes=4", "--gbs=512", "--write")
    assert recipes_cli("--recipes", own, *words).returncode == 0
    text = (own / "layouts" / "llama3_8b.toml").read_text()
    assert re.match(r'pretrain_x100_bf16 = \{ 4 = ".*gbs=512,save_every=\d+" \}\n$', text)


@pytest.mark.nemo
def test_show_has_the_lines_of_the_collection(acme, preloaded_cli):
    done = preloaded_cli("--recipes", acme, "show", MINI, "--why")
    assert done.returncode == 0, done.stderr
    where = {line.partition(" =")[0]: line.partition("# ")[2] for line in done.stdout.splitlines()}
    assert where["trainer.strategy.tensor_model_parallel_size"] == f"{acme}/layouts/acme_mini.toml:1"
    assert where["model.config"].startswith(f"{acme}/models/acme.py:")
    assert "model.config = acme_nemo.AcmeConfig" in done.stdout
    assert "model.config.hidden_size = 256" in done.stdout


@pytest.mark.nemo
def test_builds_model_from_config_json(acme, preloaded_cli):
    shown = preloaded_cli("--recipes", acme, "show", "acme_hf_pretrain_x100_bf16").stdout
    for line in ("hidden_size = 512", "num_query_groups = 2", "rotary_base = 500000.0", "num_layers = 4"):
        assert f"model.config.{line}\n" in shown
    assert "model.config.share_embeddings_and_output_weights = True" in shown


@pytest.mark.slow
@pytest.mark.nemo
def test_prove_builds_every_size(acme, preloaded_cli, tmp_path):
    done = preloaded_cli("--recipes", acme, "prove", "acme", "--cache", tmp_path / "proof.json", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 recipes at 6 sizes" in done.stdout
    assert "proven" in done.stdout


@pytest.mark.nemo
@pytest.mark.slow
def test_prove_detects_wrong_shape(own, preloaded_cli, tmp_path):
    shapes = own / "shapes" / "acme.toml"
    shapes.write_text(shapes.read_text().replace("ffn = 768", "ffn = 1024"))
    done = preloaded_cli("--recipes", own, "prove", "acme_mini", "--cache", tmp_path / "proof.json", timeout=300)
    assert (done.returncode, "FAILED  acme_mini" in done.stdout) == (1, True), done.stdout


@pytest.mark.nemo
@pytest.mark.slow
def test_exported_file_runs_with_its_module(acme, preloaded_cli, tmp_path):
    file = tmp_path / "exported.py"
    done = preloaded_cli("--recipes", acme, "export", MINI, "--to", file)
    assert done.returncode == 0, done.stderr
    module = acme / "modules" / "acme_nemo.py"
    assert f"requires a copy of {module} as acme_nemo.py." in re.sub(r"\s+", " ", file.read_text())
    alone = [sys.executable, "-W", "ignore", "-c", "import exported; print(exported.recipe().model.config)"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TORCH_EXTENSIONS_DIR": "/dev/null"}
    missing = subprocess.run(alone, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert "No module named 'acme_nemo'" in missing.stderr
    (tmp_path / "acme_nemo.py").write_text((acme / "modules" / "acme_nemo.py").read_text())
    built = subprocess.run(alone, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert "AcmeConfig" in built.stdout, built.stderr


@pytest.mark.nemo
@pytest.mark.slow
def test_job_contains_module_and_check(acme, preloaded_cli, tmp_path):
    done = preloaded_cli("--recipes", acme, "render", MINI, "--cluster=acme", env={"XDG_CACHE_HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    script = done.stdout
    assert "#SBATCH --partition=x100\n" in script
    assert "#SBATCH --gpus-per-node=4\n" in script
    assert "--checks disk fans" in script
    unpack = "sed -n '/^#>> runtime.tar.gz$/,/^#<<$/{s/^#| \\{0,1\\}//p}' | base64 --decode | tar -xz"
    code = tmp_path / "code"
    code.mkdir()
    subprocess.run(["bash", "-c", unpack], cwd=code, input=script, text=True, check=True)
    assert (code / "acme_nemo.py").read_text() == (acme / "modules" / "acme_nemo.py").read_text()
    environment = {"PATH": "/usr/bin:/bin", "FREE_GIB": "0", "RUNS": "/tmp"}
    checks = ["bash", str(code / "superpod" / "slurm" / "checks" / "node.sh"), "disk", "fans", "doors"]
    printed = subprocess.run(checks, env=environment, capture_output=True, text=True, timeout=30).stdout.splitlines()
    assert [line.split("\t")[:2] for line in printed] == [["disk", "ok"], ["fans", "ok"], ["doors", "bad"]]


def test_health_runs_the_check_on_nodes(acme):
    code = """
from superpod.slurm import node_health
from superpod.slurm.profiles import profiles
print("".join(node_health.collection_checks(profiles.load("acme"))) + (node_health.CHECKS / "node.sh").read_text())
"""
    environment = {**os.environ, collection.VARIABLE: str(acme)}
    sent = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    words = ["bash", "-c", sent.stdout, "node.sh", "fans", "doors"]
    printed = subprocess.run(words, capture_output=True, text=True, timeout=30).stdout.splitlines()
    assert [line.split("\t")[:2] for line in printed] == [["fans", "ok"], ["doors", "bad"]]


@pytest.mark.nemo
@pytest.mark.slow
def test_changed_module_changes_the_job(own, preloaded_cli, tmp_path):
    words = ("--recipes", own, "render", MINI, "--cluster=acme")
    first = preloaded_cli(*words, env={"XDG_CACHE_HOME": str(tmp_path)}).stdout
    module = own / "modules" / "acme_nemo.py"
    module.write_text(module.read_text().replace("hidden_size: int = 256", "hidden_size: int = 512"))
    second = preloaded_cli(*words, env={"XDG_CACHE_HOME": str(tmp_path)})
    assert second.stdout != first
    assert len(list((tmp_path / "superpod" / "recipes").iterdir())) == 2


@pytest.mark.train
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [MINI, "acme_hf_pretrain_x100_bf16"])
def test_rehearse(acme, recipes_cli, name):
    done = recipes_cli("--recipes", acme, "rehearse", name, "--ranks=2", "--steps=4", timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("passed")


def test_installed_package_is_a_collection(tmp_path, recipes_cli):
    """Simulate a package installed by pip, with entry points in a dist-info folder."""
    write_collection(tmp_path / "acme_recipes")
    (tmp_path / "acme_recipes" / "__init__.py").write_text("raise SystemExit('nobody needs to import this')\n")
    facts = tmp_path / "acme_recipes-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-recipes\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        f"[console_scripts]\nacme = acme:main\n\n[{collection.GROUP}]\nacme = acme_recipes\n\n[other]\na = b\n"
    )
    path = {"PYTHONPATH": str(tmp_path)}
    assert MINI in recipes_cli("list", "acme", env=path).stdout
    assert "ok: legal" in recipes_cli("check", MINI, env=path).stdout
    (facts / "entry_points.txt").write_text(f"[{collection.GROUP}]\nacme = no_such_package\n")
    gone = recipes_cli("list", "acme", env=path)
    assert (gone.returncode, "no_such_package is not a package" in gone.stderr) == (2, True)


def test_variable_with_several_collections(acme, tmp_path, recipes_cli):
    other = tmp_path / "other"
    (other / "layouts").mkdir(parents=True)
    (other / "layouts" / "acme_mini.toml").write_text('sft_x100_bf16 = { 1 = "gbs=32" }\n')
    listed = recipes_cli("list", "acme_mini", env={collection.VARIABLE: f"{acme}:{other}"}).stdout
    assert MINI in listed
    assert "acme_mini_sft_x100_bf16" in listed
    both = recipes_cli("--recipes", acme, "--recipes", other, "list", "acme_mini").stdout
    assert both == listed
