"""Sidewinder's kernels as functions of JAX, on the CPU and on CUDA.

    cargo build --release -p sidewinder_xla --example handlers        (in native/)

    import sidewinder_jax
    sidewinder_jax.register("target/release/examples/libhandlers.so")
    norm = sidewinder_jax.op("rms_norm", lambda inputs: {"y": inputs["x"]}, eps=1e-5)
    norm({"x": x, "w": w})["y"]

Functions take and give dictionaries of arrays by the names that `mix sidewinder.run OP --help` lists. They run inside
`jax.jit`, `jax.lax.scan` and `jax.grad`. What is wrong in a call raises JAX's error with the kernels' text.
"""

import ctypes

import jax
import numpy as np

TARGET = "sidewinder_op"
GRAPH_TARGET = "sidewinder_op_graph"
HANDLERS = [
    (TARGET, "cpu", "sidewinder_xla_host"),
    (TARGET, "CUDA", "sidewinder_xla_cuda"),
    (GRAPH_TARGET, "cpu", "sidewinder_xla_host"),
    (GRAPH_TARGET, "CUDA", "sidewinder_xla_cuda_graph"),
]


def register(library):
    """Makes the handlers in this library known to JAX, once in a process."""
    handlers = ctypes.CDLL(library)
    for target, platform, symbol in HANDLERS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(handlers, symbol)), platform=platform)


def call(name, inputs, outputs, graph=False, **options):
    """The outputs by name of a call of the op.

    `outputs` gives what has their shapes and types. On CUDA, `graph` lets XLA put the call into a command buffer; a call
    that needs memory of its own then raises. An option that is None has its default.
    """
    specs = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in outputs.values()]
    target = jax.ffi.ffi_call(GRAPH_TARGET if graph else TARGET, specs)
    attributes = {key: _attribute(value) for key, value in options.items() if value is not None}
    names = {"op": name, "inputs": ",".join(inputs), "outputs": ",".join(outputs)}
    return dict(zip(outputs, target(*inputs.values(), **names, **attributes)))


def op(name, outputs, saved=(), graph=False, **options):
    """A function of named inputs that gives named outputs of the op, and has the op's gradient.

    `outputs` is a function of the inputs that gives what has the outputs' shapes and types; `saved` names outputs that
    the op's gradient takes beside the inputs.
    """

    @jax.custom_vjp
    def run(inputs):
        return call(name, inputs, outputs(inputs), graph, **options)

    def forward(inputs):
        results = run(inputs)
        return results, (inputs, {output: results[output] for output in saved})

    def backward(kept, cotangents):
        inputs, results = kept
        given = inputs | results | {f"d{output}": t for output, t in cotangents.items()}
        wanted = {f"d{input}": t for input, t in inputs.items()}
        gradients = call(f"{name}_backward", given, wanted, graph, **options)
        return ({input: gradients[f"d{input}"] for input in inputs},)

    run.defvjp(forward, backward)
    return run


def _attribute(value):
    if isinstance(value, (bool, int, str)):
        return value
    return np.float64(value) if isinstance(value, float) else np.array(value, np.float64)
