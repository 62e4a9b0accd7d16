"""An experiment from somebody else cannot make timm load files, fetch weights or import code."""

import pytest

from fedsieve.errors import FedsieveError
from fedsieve.runner.preflight import blank_model

HOSTILE = {
    "checkpoint_path": "{folder}/evil.pth",
    "pretrained": "true",
    "pretrained_cfg": "{{file: {folder}/evil.pth}}",
    "pretrained_cfg_overlay": "{{file: {folder}/evil.pth}}",
    "pretrained_strict": "false",
    "cache_dir": "{folder}",
    "scriptable": "true",
    "norm_layer": "os.system",
    "act_layer": "os.system",
    "block_fn": "os.system",
    "depth": "{folder}",
    "embed_dim": "[[{folder}]]",
    "num_heads": "{{a: 1}}",
}


@pytest.mark.parametrize("key", HOSTILE)
def test_options_that_choose_files_addresses_or_code_are_refused_before_anything_is_built(
    tiny, tmp_path, monkeypatch, key
):
    monkeypatch.setattr("timm.create_model", lambda *_, **__: pytest.fail("timm was asked to build it"))
    experiment = tiny(f"model.options={{{key}: {HOSTILE[key].format(folder=tmp_path)}}}")
    with pytest.raises(FedsieveError, match=f"model.options.*{key}.* not allowed"):
        blank_model(experiment, 10)
