import json

from superpod.rehearsal import result_files


def test_levels_have_a_line_for_each_item_and_deeper_ones_none(tmp_path):
    value = {"a": {"x": [1, {"y": 2}], "z": {}}, "b": [], 3: "text"}
    result_files.write(tmp_path / "one.json", value, levels=1)
    result_files.write(tmp_path / "two.json", value, levels=2)
    one, two = ((tmp_path / f"{name}.json").read_text() for name in ("one", "two"))
    assert one == '{\n "a": {"x": [1, {"y": 2}], "z": {}},\n "b": [],\n "3": "text"\n}\n'
    assert two == '{\n "a": {\n  "x": [1, {"y": 2}],\n  "z": {}\n },\n "b": [],\n "3": "text"\n}\n'
    assert json.loads(one) == json.loads(two) == json.loads(json.dumps(value))


def test_nothing_is_an_empty_object(tmp_path):
    result_files.write(tmp_path / "none.json", {}, levels=3)
    assert (tmp_path / "none.json").read_text() == "{}\n"
