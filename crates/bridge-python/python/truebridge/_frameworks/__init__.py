"""What the package knows of single frameworks: a row for each in ``table``, and the functions that need no more.

The module of a row has the name of its framework. ``pairs``, ``calls``, ``onnxruntime`` and ``shards`` have functions
of ``truebridge``, and ``compiled`` is for PyTorch's compiler.
"""
