//! How far results are from a reference.

use sidewinder_kernels::difference::{Difference, difference};
use sidewinder_kernels::error::Kind;
use sidewinder_kernels::tensor::{DType, Owned, Spec};

#[test]
fn sums_of_squares_and_the_largest() {
    let of = |dtype, scale| Owned::from_fn(Spec::new(dtype, &[3]).unwrap(), |i| scale * [3.0, -4.0, 0.0][i]);
    for dtype in DType::FLOATS {
        let difference = difference(of(DType::F32, 1.5).view(), of(dtype, 1.0).view()).unwrap();
        assert_eq!(difference, Difference { squares: 6.25, reference: 25.0, largest: 2.0 });
    }
    let other = Owned::poisoned(Spec::new(DType::F32, &[1, 3]).unwrap());
    assert_eq!(difference(other.view(), of(DType::F32, 1.0).view()).unwrap_err().kind, Kind::Shape);
    assert!(difference(of(DType::F64, 1.0).view(), of(DType::F32, 1.0).view()).is_err());
}
