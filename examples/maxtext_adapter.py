"""MaxText as the candidate: its own model from its own config and a converted tree. Written against PyPI maxtext 0.2.5.

    MAXTEXT_ARGS="src/maxtext/configs/base.yml model_name=olmo3-7b scan_layers=true" \\
    olmo-parity --reference HF_FOLDER --candidate RUN/0/items --candidate-fn maxtext_adapter:make

MAXTEXT_ARGS are the arguments of your training command, so that what is judged is what will be trained. The adapter sets
what the gate decides: checkpoint, dtypes, batch size, and the window where one is imposed. maxtext 0.2.5 applies YaRN to
sliding layers too: a config with YaRN fails the gate, rightly.
"""

import importlib.util
import os
import shlex


def make(checkpoint, config, dtype, sliding_window):
    """checkpoint: the items folder of a MaxText tree. Returns forward(tokens, positions, segment_ids) -> logits."""
    if importlib.util.find_spec("maxtext") is None:
        raise ModuleNotFoundError("MaxText is not installed: pip install maxtext==0.2.5 (Python 3.12 or later)")
    if checkpoint is None or "MAXTEXT_ARGS" not in os.environ:
        raise ValueError("give --candidate ITEMS_FOLDER, and in MAXTEXT_ARGS the arguments of your training command")
    import jax
    from flax import linen
    from maxtext.configs import pyconfig
    from maxtext.utils import model_creation_utils

    given = shlex.split(os.environ["MAXTEXT_ARGS"])
    added = {
        "load_parameters_path": checkpoint.absolute(),
        "dtype": dtype,
        "weight_dtype": dtype,
        "per_device_batch_size": 1,
        "skip_jax_distributed_system": True,
        "log_config": False,
        "override_model_config": True,
    }
    if dtype == "float32":
        added["matmul_precision"] = "highest"
    if sliding_window is not None:
        added["sliding_window_size"] = sliding_window
    if jax.default_backend() == "cpu":
        added |= {"hardware": "cpu", "attention": "dot_product"}
    given = [word for word in given if word.split("=", 1)[0] not in added]  # the gate decides these
    words = [f"{key}={value}" for key, value in added.items()]
    hyper = pyconfig.initialize(["train", *given, *words])
    if hyper.vocab_size != config["vocab_size"]:
        raise ValueError(f"MaxText's vocab_size is {hyper.vocab_size}, the reference's is {config['vocab_size']}")
    model, mesh = model_creation_utils.from_pretrained(hyper)

    def forward(tokens, positions, segment_ids):
        with mesh, linen.logical_axis_rules(hyper.logical_axis_rules):
            return model(tokens, positions, segment_ids, enable_dropout=False)

    return forward
