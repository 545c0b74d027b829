"""Products and attention in bf16: inputs in float32, which each contender rounds before it is timed."""

from transformer import ATTENTION, LINEAR, Workload, exact

BF16 = dict(type="bf16", rtol=2e-2)


def factors(random, rows, inner, columns):
    b = random.standard_normal((inner, columns)) / inner**0.5
    return dict(a=random.standard_normal((rows, inner)), b=b)


PRODUCT = LINEAR._replace(
    name="matmul", inputs=factors, truth=exact(lambda a, b: a @ b, "c"), ours="matmul"
)


def workload(op, *sizes, names):
    label = "x".join(map(str, sizes))
    return Workload(f"{op.name}-{label}", op._replace(**BF16), dict(zip(names, sizes)))


SIZES = dict(
    linear=("rows", "inputs", "outputs"),
    matmul=("rows", "inner", "columns"),
    attention=("batch", "heads", "length", "width"),
)
# Those of mamba-130m with a prompt of 512, a square one, few rows, and the transformers' attention.
WORKLOADS = tuple(
    workload(op, *sizes, names=SIZES[op.name])
    for op, *sizes in (
        (LINEAR, 512, 768, 3072),
        (LINEAR, 512, 1536, 768),
        (LINEAR, 128, 4096, 4096),
        (LINEAR, 16, 4096, 4096),
        (LINEAR, 1, 4096, 4096),
        (PRODUCT, 512, 768, 3072),
        (ATTENTION, 4, 8, 128, 64),
        (ATTENTION, 1, 16, 2048, 64),
    )
)
