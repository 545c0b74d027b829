//! Declarations of ops: rules that hold for all of them, and the sizes that their patterns bind in calls.

use sidewinder_kernels::error::Result;
use sidewinder_kernels::op::pattern::{Axis, ONE, Term};
use sidewinder_kernels::op::{About, AnyOp, Call, Name, Options, Pattern, Range, Sizes, Slot, Takes, about};
use sidewinder_kernels::ops::products::matmul::Matmul;
use sidewinder_kernels::ops::{OPS, find};
use sidewinder_kernels::tensor::{DType, Spec};

fn defaults(op: &dyn AnyOp) -> serde_json::Value {
    serde_json::to_value(&*op.defaults()).unwrap()
}

#[test]
fn every_option_is_described() {
    for &op in OPS {
        let defaults = defaults(op);
        for option in op.options() {
            let name = format!("{} of {}", option.doc.name, op.about().name);
            assert!(!option.doc.help.is_empty(), "{name}");
            assert_eq!(option.doc.help.trim(), option.doc.help, "{name}");
            assert!(
                op.with(&mut <dyn erased_serde::Deserializer>::erase(serde_json::json!({
                    option.doc.name: defaults[option.doc.name]
                })))
                .is_ok(),
                "{name}"
            );
        }
    }
}

#[test]
fn types_and_defaults_are_told() {
    let scan = find("selective_scan").unwrap();
    let (options, defaults) = (scan.options(), defaults(scan));
    let told = |name| {
        let option = options.iter().find(|option| option.doc.name == name).unwrap();
        (option.takes, defaults[name].to_string())
    };
    assert_eq!(told("dt_softplus"), (Takes::Flag, "false".to_string()));
    assert_eq!(told("dt_clamp"), (Takes::Pair, "null".to_string()));
    assert_eq!(told("clamp_grad"), (Takes::Text(&["mask", "straight_through"]), "\"mask\"".to_string()));
}

#[test]
fn options_answer_to_the_names_that_users_know() {
    sidewinder_kernels::options! {
        /// One name is a keyword of the language.
        pub struct Renamed {
            /// the rate
            rate as "in": f64 = 1.0, positive;
            /// whether to go
            go: bool = true;
        }
    }
    let options = Renamed { rate: -1.0, ..Renamed::default() };
    assert_eq!(&*options.check().unwrap_err().argument, "in");
    assert_eq!(options.value("in").and_then(|value| value.downcast_ref()), Some(&-1.0));
    assert!(options.value("rate").is_none() && options.flag("go"));
}

#[test]
fn a_name_given_twice_is_refused() {
    let spec = Spec::new(DType::F32, &[2, 2]).unwrap();
    let inputs = ["a", "b", "a"].into_iter().map(|name| (Name::from(name), spec)).collect();
    let error = Call::new::<Matmul>(inputs, &Default::default()).map(drop).unwrap_err();
    assert_eq!(error.to_string(), "matmul: a: expected one tensor, got two of this name");
}

#[test]
fn numbers_below_their_range_or_above_it_are_refused() {
    let refused = |range: Range, number: f64| range.check("eps", &number).err().map(|e| e.expected.to_string());
    for (range, inside, outside) in [
        (Range::positive, vec![1e-9, 1e300], vec![0.0, -1.0, f64::INFINITY, f64::NAN]),
        (Range::not_negative, vec![0.0, 1e300], vec![-1e-9, f64::INFINITY, f64::NAN]),
        (Range::not_positive, vec![0.0, -1e38], vec![1e-9, f64::NEG_INFINITY, f64::NAN]),
        (Range::share, vec![0.0, 0.5, 1.0], vec![-1e-9, 1.1, f64::NAN]),
    ] {
        assert!(inside.iter().all(|&number| refused(range, number).is_none()), "{range:?}");
        assert!(outside.iter().all(|&number| refused(range, number).is_some()), "{range:?}");
    }
    assert_eq!(refused(Range::share, 2.0).as_deref(), Some("a number from 0 to 1"));
    assert_eq!(refused(Range::not_positive, 2.0).as_deref(), Some("a finite number that is not positive"));
}

/// Otherwise a sum, or an output, would have no determined size.
#[test]
fn every_letter_of_a_sum_or_an_output_stands_alone_in_an_input_that_must_be_there() {
    for about in OPS.iter().map(|op| op.about()) {
        let proven = || about.inputs.iter().filter(|slot| !slot.loose);
        let required = || proven().filter(|slot| !slot.optional).map(|slot| &slot.shape);
        let alone: Vec<u8> = required().flat_map(|shape| shape.axes().iter().filter_map(Axis::letter)).collect();
        let has = |term: &Term| term.factor == 0 || term.letter == ONE || alone.contains(&term.letter);
        let sums = proven().flat_map(|slot| slot.shape.axes()).filter(|axis| axis.letter().is_none());
        let outputs = about.outputs.iter().flat_map(|output| output.shape.axes());
        for axis in sums.chain(outputs) {
            assert!(axis.terms.iter().all(has), "{}", about.name);
        }
        let rows = about.outputs.iter().any(|output| output.shape.rows);
        assert!(!rows || required().any(|shape| shape.rows), "{}", about.name);
        assert!(proven().all(|slot| !slot.shape.words.contains(" | ")), "{}", about.name);
    }
}

/// Otherwise a gradient could get outputs of the op, or cotangents, of other shapes.
#[test]
fn gradients_take_outputs_as_they_are_declared() {
    for about in OPS.iter().map(|op| op.about()) {
        let Some(of) = about.backward_of else { continue };
        for output in find(of).unwrap().about().outputs {
            let names = [output.name.to_string(), format!("d{}", output.name)];
            let given = about.inputs.iter().filter(|slot| names.iter().any(|name| name == slot.name));
            for slot in given {
                assert!(!slot.loose && slot.shape.words == output.shape.words, "{} of {}", slot.name, about.name);
            }
        }
    }
}

fn bound(inputs: &'static [Slot], dims: &[(&'static str, &[usize])]) -> Result<Sizes> {
    let spec = |dims| Spec::new(DType::F32, dims).unwrap();
    let op = About { inputs, ..*about::<Matmul>() };
    Sizes::bind(&op, &dims.iter().map(|&(name, dims)| (name, spec(dims))).collect())
}

#[test]
fn letters_have_one_size() {
    const SLOTS: &[Slot] = &[Slot::new("a", "(B, L, K)"), Slot::new("b", "(B, L, K)")];
    let sizes = bound(SLOTS, &[("a", &[2, 3, 4]), ("b", &[2, 3, 4])]).unwrap();
    assert_eq!(sizes.all("BLK"), [2, 3, 4]);
    assert_eq!(sizes.find('D'), None);
    let error = bound(SLOTS, &[("a", &[2, 3, 4]), ("b", &[2, 3, 5])]).unwrap_err();
    assert_eq!(&*error.expected, "shape (2, 3, 4)");
    assert_eq!(&*bound(SLOTS, &[("a", &[2, 3])]).unwrap_err().expected, "shape (B, L, K)");
}

#[test]
fn sums_multiples_and_rows() {
    const SLOTS: &[Slot] = &[
        Slot::new("x_proj", "(R+2N, D)"),
        Slot::new("A", "(D, N)"),
        Slot::new("dt_w", "(D, R)"),
        Slot::new("w", "(D, W)"),
        Slot::new("state", "(B, W-1, D)"),
        Slot::new("q", "(O, 17I/16)"),
        Slot::new("x", "(..., 2I)"),
        Slot::new("bias", "(I)"),
    ];
    let right: [(&str, &[usize]); 8] = [
        ("x_proj", &[9, 5]),
        ("A", &[5, 4]),
        ("dt_w", &[5, 1]),
        ("w", &[5, 4]),
        ("state", &[1, 3, 5]),
        ("q", &[7, 34]),
        ("x", &[6, 2, 64]),
        ("bias", &[32]),
    ];
    let sizes = bound(SLOTS, &right).unwrap();
    assert_eq!(sizes.all("DNWIR"), [5, 4, 4, 32, 1]);
    assert_eq!(sizes.rows(), [6, 2]);
    assert_eq!(sizes.shape(&Pattern::new("(..., W-1, 17I/16)")), Some(vec![6, 2, 3, 34]));
    for (name, dims) in [("x_proj", &[8, 5][..]), ("state", &[1, 4, 5]), ("q", &[7, 35]), ("x", &[6, 63])] {
        let wrong = right.map(|(n, right)| (n, if n == name { dims } else { right }));
        assert_eq!(&*bound(SLOTS, &wrong).unwrap_err().argument, name);
    }
}

#[test]
fn axes_that_may_be_one() {
    const SLOTS: &[Slot] = &[Slot::new("x", "(B, L, D)"), Slot::new("mask", "(B|1, L|1)")];
    for mask in [[2, 3], [1, 3], [1, 1]] {
        assert!(bound(SLOTS, &[("x", &[2, 3, 4]), ("mask", &mask)]).is_ok());
    }
    let error = bound(SLOTS, &[("x", &[2, 3, 4]), ("mask", &[2, 2])]).unwrap_err();
    assert_eq!(&*error.expected, "shape (2 or 1, 3 or 1)");
}
