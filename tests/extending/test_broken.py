"""Test that errors in a collection are reported with file and line instead of a traceback."""

import pytest

LIST = ("list", "acme")
PLAN = ("plan", "acme_mini", "--gpu=x100", "--gpus=8")
RENDER = ("render", "acme_mini_pretrain_x100_bf16", "--cluster")

DOCSTRING = "'''Another.'''"
YARN = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}'
MODEL = "\n\n@model(**FACTS)\ndef {}():\n    '''Another.'''\n"
RECIPE = '{} = {{ 1 = "gbs=8" }}\n'


@pytest.mark.parametrize(
    ("file", "change", "words", "place", "says"),
    [
        ("models/acme.py", lambda text: text + "def (\n", LIST, "models/acme.py:25", "SyntaxError: invalid syntax"),
        ("models/acme.py", lambda text: text + "1 / 0\n", LIST, "models/acme.py:25", "ZeroDivisionError"),
        ("models/acme.py", lambda text: "import nonsense\n" + text, LIST, "models/acme.py:1", "No module named"),
        (
            *("models/acme.py", lambda text: text.replace('"seq": 2048', '"sequence": 2048'), LIST),
            *("models/acme.py:11", "unexpected keyword argument 'sequence'"),
        ),
        (
            *("models/acme.py", lambda text: text + MODEL.format("llama3_8b"), LIST),
            *("models/acme.py:27", "two models are named llama3_8b"),
        ),
        (
            *("models/acme.py", lambda text: text + MODEL.format("acme_mini"), LIST),
            *("models/acme.py:27", "two models are named acme_mini"),
        ),
        (
            *("models/acme.py", lambda text: text + MODEL.format("acme_maxi"), LIST),
            *("models/acme.py:27", "there is no model 'acme_maxi'"),
        ),
        (
            *("models/acme.py", lambda text: text + MODEL.format("acme_maxi").replace(DOCSTRING, "pass"), LIST),
            *("models/acme.py:27", "acme_maxi has no docstring"),
        ),
        ("models/more.py", lambda text: "\0", LIST, "models/more.py:1", "null bytes"),
        (
            "shapes/acme.toml",
            lambda text: text + "heds = 3\n",
            LIST,
            "shapes/acme.toml:1",
            "there is no model key 'heds'",
        ),
        (
            "shapes/acme.toml",
            lambda text: text + "[llama3_8b]\n",
            PLAN,
            "shapes/acme.toml:8",
            "llama3_8b already exists",
        ),
        (
            "shapes/acme.toml",
            lambda text: text + "['a b']\n",
            PLAN,
            "shapes/acme.toml:8",
            "'a b' is not a valid model name",
        ),
        ("shapes/acme_hf.json", lambda text: "{", LIST, "shapes/acme_hf.json", "is not JSON"),
        ("shapes/acme.yaml", lambda text: "a: 1", LIST, "shapes/acme.yaml", "must be a .toml or .json file"),
        (
            *("hardware.toml", lambda text: text.replace("bf16_tflops", "bf16_tflop"), PLAN),
            *("hardware.toml:5 [gpu.x100]", "there is no key 'bf16_tflop'"),
        ),
        (
            "hardware.toml",
            lambda text: text + "[gpu.h100]\n",
            LIST,
            "hardware.toml:13 [gpu.h100]",
            "h100 already exists",
        ),
        (
            *("hardware.toml", lambda text: text + "[gpu.h100-80gb]\n", LIST),
            *("hardware.toml:13 [gpu.h100-80gb]", "h100-80gb already exists"),
        ),
        ("hardware.toml", lambda text: text + "[node.x101]\n", LIST, "hardware.toml:13 [node.x101]", "gpu is missing"),
        ("hardware.toml", lambda text: text + "[nod.x]\n", LIST, "hardware.toml:1", "there is no section 'nod'"),
        ("hardware.toml", lambda text: "[", PLAN, "hardware.toml", "is not TOML"),
        ("layouts/maxi.toml", lambda text: RECIPE.format("sft_h100_bf16"), LIST, "layouts/maxi.toml", "no model"),
        (
            *("layouts/llama3_8b.toml", lambda text: RECIPE.format("pretrain_h100_bf16"), LIST),
            *("layouts/llama3_8b.toml:1", "llama3_8b_pretrain_h100_bf16 is already declared"),
        ),
        (
            "layouts/acme_hf.toml",
            lambda text: text + 'sft_x100_bf16.2 = "tp=2"',
            LIST,
            "layouts/acme_hf.toml:3",
            "gbs is",
        ),
        (
            *("layouts/acme_hf.toml", lambda text: RECIPE.format("sft_y100_bf16"), LIST),
            *("layouts/acme_hf.toml:1", "sft_y100_bf16 must have the form [NNk_]TASK_GPU_PRECISION"),
        ),
        ("modules/torch.py", lambda text: "", LIST, "modules/torch.py", "torch is not a valid module name"),
        ("modules/json.py", lambda text: "", LIST, "modules/json.py", "json is not a valid module name"),
        ("modules/my code.py", lambda text: "", LIST, "modules/my code.py", "my code is not a valid module name"),
        (
            *("clusters/acme.toml", lambda text: text.replace("x100", "y100", 1), (*RENDER, "acme")),
            *("clusters/acme.toml:1", "gpu must be one of a100"),
        ),
        (
            *("clusters/acme.toml", lambda text: text.replace("fans", "doors"), (*RENDER, "acme")),
            *("clusters/acme.toml:14", "gpus, nvlink, infiniband"),
        ),
        (
            "clusters/dgx_h100.toml",
            lambda text: "",
            (*RENDER, "acme"),
            "clusters/dgx_h100.toml",
            "already has this name",
        ),
        ("checks/disk.sh", lambda text: "", (*RENDER, "acme"), "checks/disk.sh", "already has this name"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reports_file_and_line(own, recipes_cli, file, change, words, place, says):
    path = own / file
    path.write_text(change(path.read_text() if path.exists() else ""))
    done = recipes_cli("--recipes", own, *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"{own}/{place}" in done.stderr
    assert says in done.stderr
    assert "\n  next: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.nemo
def test_refuses_class_in_models_folder(own, preloaded_cli):
    """Ranks could not import the class."""
    models = own / "models" / "acme.py"
    module = (own / "modules" / "acme_nemo.py").read_text().partition("\n\n")[2]
    indented = "".join(f"    {line}\n" if line else "\n" for line in module.splitlines())
    models.write_text(models.read_text().replace("    from acme_nemo import AcmeConfig\n", indented))
    done = preloaded_cli("--recipes", own, "show", "acme_mini_pretrain_x100_bf16")
    assert (done.returncode, "ranks cannot import" in done.stderr) == (2, True), done.stderr
    assert "modules/" in done.stderr


@pytest.mark.nemo
@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("from acme_nemo", "from acme_nimo", "models/acme.py:15: ModuleNotFoundError: No module named 'acme_nimo'"),
        ("run.Config(AcmeConfig)", "run.Config(AcmeConfig, hidden=3)", "models/acme.py:18: TypeError"),
    ],
)
def test_reports_line_of_error_in_model_function(own, preloaded_cli, old, new, says):
    models = own / "models" / "acme.py"
    models.write_text(models.read_text().replace(old, new))
    done = preloaded_cli("--recipes", own, "show", "acme_mini_pretrain_x100_bf16")
    assert (done.returncode, f"{own}/{says}" in done.stderr) == (2, True), done.stderr


@pytest.mark.nemo
@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"rms_norm_eps"', '"attention_bias": true, "rms_norm_eps"', "attention_bias is True and mlp_bias is False"),
        ('"rms_norm_eps"', '"clip_qkv": 8, "rms_norm_eps"', "clip_qkv is not a key of LlamaConfig"),
        ('"rms_norm_eps"', f'"rope_scaling": {YARN}, "rms_norm_eps"', "rope_scaling has type 'yarn'"),
        ('"model_type": "llama"', '"model_type": "olmo2"', "cannot import model_type"),
    ],
)
def test_refuses_config_json_without_nemo_class(own, preloaded_cli, old, new, says):
    path = own / "shapes" / "acme_hf.json"
    path.write_text(path.read_text().replace(old, new))
    done = preloaded_cli("--recipes", own, "show", "acme_hf_pretrain_x100_bf16")
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr
    assert str(path) in done.stderr


def test_refuses_missing_folder(tmp_path, recipes_cli):
    file = tmp_path / "file"
    file.write_text("")
    for words, environment in (
        (("--recipes", tmp_path / "no such", "list"), {}),
        (("--recipes", file, "list"), {}),
        (("list",), {"SUPERPOD_RECIPES": str(tmp_path / "no such")}),
        (("list",), {"SUPERPOD_RECIPES": str(file)}),
    ):
        done = recipes_cli(*words, env=environment)
        assert done.returncode == 2, words
        assert "does not exist" in done.stderr or "is a file, not a folder" in done.stderr
        assert "next: specify the folder that contains" in done.stderr


def test_refuses_colon_in_path(tmp_path, recipes_cli):
    folder = tmp_path / "a:b"
    folder.mkdir()
    done = recipes_cli("--recipes", folder, "list")
    assert (done.returncode, "separates folders" in done.stderr) == (2, True)


@pytest.mark.parametrize(("name", "next_move"), [("", "docs/extending.md"), ("layout", "did you mean layouts")])
def test_refuses_folder_without_collection(name, next_move, tmp_path, recipes_cli):
    """Otherwise its recipes would be missing without an error."""
    if name:
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.toml").touch()
    for words, environment in ((("--recipes", tmp_path), {}), ((), {"SUPERPOD_RECIPES": str(tmp_path)})):
        done = recipes_cli(*words, "list", env=environment)
        assert (done.returncode, "contains no file of a collection" in done.stderr) == (2, True), words
        assert next_move in done.stderr


def test_ignores_hidden_files(own, recipes_cli):
    (own / "layouts" / ".acme_mini.toml.swp.toml").write_text("not TOML [")
    (own / "models" / "__init__.py").write_text("1 / 0\n")
    assert recipes_cli("--recipes", own, *LIST).returncode == 0
