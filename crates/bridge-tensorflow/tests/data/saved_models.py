"""Save the models that the tests of sessions load: ``python saved_models.py``, with TensorFlow 1.15 and with 2.x.

Each has variables, which a session restores, and a table, which its initialiser fills from an asset.
``serving_default`` computes ``scores = images @ weights + bias``; ``look_up`` maps 1, 2 and 3 to their squares, and
other numbers to -1.
"""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import tensorflow as tf

WEIGHTS = np.arange(6, dtype=np.float32).reshape(3, 2)
BIAS = np.array([10, 20], dtype=np.float32)
SQUARES = "1 1\n2 4\n3 9\n"


def table(asset):
    """Return a table of integers, filled from the columns of a file."""
    whole = tf.int64
    columns = tf.lookup.TextFileInitializer(asset, whole, 0, whole, 1, delimiter=" ")
    return tf.lookup.StaticHashTable(columns, -1)


def save_one(folder, asset):
    """Save the model of 1.x, with a variable of each kind."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 3], name="x")
        keys = v1.placeholder(tf.int64, [None], name="keys")
        weights = v1.get_variable("weights", initializer=WEIGHTS, use_resource=False)
        bias = v1.get_variable("bias", initializer=BIAS, use_resource=True)
        scores = tf.add(tf.matmul(x, weights), bias, name="scores")
        # The table adds it to the collection once more.
        v1.add_to_collection(v1.GraphKeys.ASSET_FILEPATHS, tf.constant(asset))
        squares = table(v1.get_collection(v1.GraphKeys.ASSET_FILEPATHS)[0]).lookup(keys)
        session.run([v1.global_variables_initializer(), v1.tables_initializer()])
        define = v1.saved_model.predict_signature_def
        signatures = {
            "serving_default": define({"images": x}, {"scores": scores}),
            "look_up": define({"keys": keys}, {"squares": squares}),
        }
        builder = v1.saved_model.Builder(folder)
        assets = v1.get_collection(v1.GraphKeys.ASSET_FILEPATHS)
        builder.add_meta_graph_and_variables(
            session, ["serve"], signatures, assets_collection=assets, main_op=v1.tables_initializer()
        )
        builder.save()


def save_two(folder, asset):
    """Save the model of 2.x."""

    class Model(tf.Module):
        def __init__(self):
            super().__init__()
            self.weights, self.bias = tf.Variable(WEIGHTS), tf.Variable(BIAS)
            self.asset = tf.saved_model.Asset(asset)
            self.table = table(self.asset)

        @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32, "images")])
        def score(self, images):
            return {"scores": images @ self.weights + self.bias}

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, "keys")])
        def look_up(self, keys):
            return {"squares": self.table.lookup(keys)}

    model = Model()
    tf.saved_model.save(model, folder, {"serving_default": model.score, "look_up": model.look_up})


if __name__ == "__main__":
    series = tf.__version__.split(".")[0]
    folder = Path(__file__).parent / f"saved{series}"
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        asset = Path(temporary) / "squares.txt"
        asset.write_text(SQUARES)
        (save_one if series == "1" else save_two)(str(folder), str(asset))
