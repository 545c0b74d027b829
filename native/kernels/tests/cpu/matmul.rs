//! The product of matrices and its gradient against their f64 references and finite differences.

use crate::common;
use crate::common::check;
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::error::Kind;
use sidewinder_kernels::op::Named;
use sidewinder_kernels::ops::products::matmul::{Matmul, MatmulBackward, Options};
use sidewinder_kernels::tensor::Owned;

fn inputs(m: usize, k: usize, n: usize) -> Named<Owned> {
    check::inputs(&[("a", &[m, k]), ("b", &[k, n])])
}

#[test]
fn every_level_and_type_agrees_with_the_reference() {
    let few = (1..=5).flat_map(|m| [1, 7, 16, 33, 130].map(|n| [m, 67, n]));
    let sizes = [[1, 1, 1], [13, 19, 23], [127, 97, 73], [300, 64, 48], [1, 4096, 2], [1, 3, 5000], [2, 1000, 700]];
    for [m, k, n] in few.chain(sizes).chain([[0, 3, 4], [3, 0, 4], [3, 4, 0]]) {
        check::agrees_everywhere::<Matmul>(&Options {}, &inputs(m, k, n));
        let backward = check::backward_inputs::<Matmul, MatmulBackward>(&Options {}, &inputs(m, k, n));
        check::agrees_everywhere::<MatmulBackward>(&Options {}, &backward);
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    check::gradients_agree_with_differences::<Matmul, MatmulBackward>(&Options {}, &inputs(2, 3, 4));
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    for (a, b, argument) in
        [(&[3][..], &[3, 4][..], "a"), (&[2, 3], &[4, 3], "b"), (&[2, 3], &[3], "b"), (&[1, 2, 3], &[3, 1], "a")]
    {
        let inputs = check::inputs(&[("a", a), ("b", b)]);
        let error = common::run::<Matmul>(&Options {}, &inputs, &Exec::default()).err().expect("a refusal");
        assert_eq!((error.kind, &*error.argument, &*error.op), (Kind::Shape, argument, "matmul"), "{error}");
    }
}
