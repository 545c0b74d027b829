//! What all declarations of ops keep.

use sidewinder_kernels::op::Takes;
use sidewinder_kernels::op::pattern::{Axis, ONE, Term};
use sidewinder_kernels::ops::{OPS, find};

#[test]
fn every_option_is_described() {
    for op in OPS {
        for option in op.options() {
            let name = format!("{} of {}", option.doc.name, op.about().name);
            assert!(!option.doc.help.is_empty(), "{name}");
            assert_eq!(option.doc.help.trim(), option.doc.help, "{name}");
            assert!(
                op.with(&mut <dyn erased_serde::Deserializer>::erase(serde_json::json!({
                    option.doc.name: option.default
                })))
                .is_ok(),
                "{name}"
            );
        }
    }
}

#[test]
fn types_and_defaults_are_told() {
    let scan = find("selective_scan").unwrap().options();
    let told = |name| {
        let option = scan.iter().find(|option| option.doc.name == name).unwrap();
        (option.takes, option.default.to_string())
    };
    assert_eq!(told("dt_softplus"), (Takes::Flag, "false".to_string()));
    assert_eq!(told("dt_clamp"), (Takes::Pair, "null".to_string()));
    assert_eq!(told("clamp_grad"), (Takes::Text(&["mask", "straight_through"]), "\"mask\"".to_string()));
}

/// Else a sum, or an output, would have no size, or any.
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

/// Else a gradient would take values of the op, or cotangents, of other shapes.
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
