//! Building blocks of CPU kernels: functions, rounding, panels of matrices, and threads.

mod math {
    use sidewinder_kernels::cpu::math::{sigmoid, softplus};
    use sidewinder_kernels::cpu::vector::MAX_LANES;
    use sidewinder_kernels::cpu::{Level, Real, Vector, Work};

    /// Applies a function to values in place, a vector at a time.
    struct Apply<'a, F>(&'a mut [f32], F);

    trait Function: Copy {
        fn apply<V: Vector<Element = f32>>(self, v: V) -> V;
    }

    impl<F: Function> Work<f32> for Apply<'_, F> {
        type Output = ();
        #[inline(always)]
        fn run<V: Vector<Element = f32>>(self) {
            for chunk in self.0.chunks_exact_mut(V::LANES) {
                self.1.apply(V::load(chunk)).store(chunk);
            }
        }
    }

    macro_rules! function {
        ($name:ident, $function:path) => {
            #[derive(Clone, Copy)]
            struct $name;
            impl Function for $name {
                #[inline(always)]
                fn apply<V: Vector<Element = f32>>(self, v: V) -> V {
                    $function(v)
                }
            }
        };
    }
    function!(Exp2, Vector::exp2);
    function!(Exp2Near, Vector::exp2_near);
    function!(Exp, Vector::exp);
    function!(Ln, Vector::ln);
    function!(Ln1p, Vector::ln_1p);
    function!(Softplus, softplus);
    function!(Sigmoid, sigmoid);
    function!(Erf, Vector::erf);

    /// The error of an f32, in distances between neighbouring f32 numbers at the true value.
    fn ulp(got: f32, truth: f64) -> f64 {
        let near = truth as f32;
        if got == near {
            return 0.0;
        }
        let step = (f32::from_bits(near.abs().to_bits() + 1) as f64 - near.abs() as f64)
            .max(f32::MIN_POSITIVE as f64 * 1.2e-7);
        (got as f64 - truth).abs() / step
    }

    /// Every bit pattern of f32 between two values of one sign, `stride` apart; fewer under AddressSanitizer, which does
    /// not check arithmetic.
    fn patterns(from: f32, to: f32, stride: usize) -> impl Iterator<Item = f32> + Clone {
        let stride = if cfg!(fuzzing) { 61 * stride } else { stride };
        (from.to_bits()..=to.to_bits()).step_by(stride).map(f32::from_bits)
    }

    /// The largest error in ULP over the given values, on every level.
    fn worst(function: impl Function, truth: impl Fn(f64) -> f64, values: impl Iterator<Item = f32> + Clone) -> f64 {
        let mut worst = 0.0f64;
        for &level in Level::available().iter().filter(|&&level| level != Level::Reference) {
            let mut values = values.clone().peekable();
            while values.peek().is_some() {
                let arguments: Vec<f32> = values.by_ref().take(MAX_LANES * 256).collect();
                let mut results = arguments.clone();
                results.resize(results.len().next_multiple_of(MAX_LANES), 0.0);
                f32::dispatch(level, Apply(&mut results, function));
                for (&argument, &result) in arguments.iter().zip(&results) {
                    let error = ulp(result, truth(argument as f64));
                    assert!(error < 4.0, "{argument} gives {result} on {}: {error} ULP", level.name());
                    worst = worst.max(error);
                }
            }
        }
        worst
    }

    #[test]
    fn exp2_is_accurate_over_its_range() {
        let negative = worst(Exp2, f64::exp2, patterns(-0.0, -125.49, 97));
        let positive = worst(Exp2, f64::exp2, patterns(0.0, 127.99, 97));
        assert!(negative <= 2.25 && positive <= 2.25, "{negative} {positive}");
        println!("exp2: {:.2} ULP", negative.max(positive));
    }

    #[test]
    fn exp2_near_is_accurate_where_it_is_told_to_be() {
        let negative = worst(Exp2Near, f64::exp2, patterns(-0.0, -125.0, 97));
        let positive = worst(Exp2Near, f64::exp2, patterns(0.0, 125.0, 97));
        assert!(negative <= 2.25 && positive <= 2.25, "{negative} {positive}");
    }

    #[test]
    fn exp_is_accurate_over_its_range() {
        let negative = worst(Exp, f64::exp, patterns(-0.0, -86.9, 97));
        let positive = worst(Exp, f64::exp, patterns(0.0, 88.7, 97));
        assert!(negative <= 1.25 && positive <= 1.25, "{negative} {positive}");
        println!("exp: {:.2} ULP", negative.max(positive));
    }

    #[test]
    fn the_functions_built_on_exp_are_accurate() {
        let ln = worst(Ln1p, f64::ln_1p, patterns(0.0, 1.0, 97));
        let softplus_truth = |v: f64| v.max(0.0) + (-v.abs()).exp().ln_1p();
        let softplus = worst(Softplus, softplus_truth, patterns(-0.0, -85.0, 97).chain(patterns(0.0, 1e9, 97)));
        let sigmoid =
            worst(Sigmoid, |v| 1.0 / (1.0 + (-v).exp()), patterns(-0.0, -85.0, 97).chain(patterns(0.0, 1e9, 97)));
        assert!(ln <= 2.75 && softplus <= 3.75 && sigmoid <= 2.5, "{ln} {softplus} {sigmoid}");
        println!("ln_1p: {ln:.2}, softplus: {softplus:.2}, sigmoid: {sigmoid:.2} ULP");
    }

    #[test]
    fn ln_is_accurate_over_its_range_and_near_1() {
        let all = worst(Ln, f64::ln, patterns(f32::from_bits(1), f32::MAX, 97));
        let near = worst(Ln, f64::ln, patterns(0.99, 1.01, 1));
        assert!(all <= 2.75 && near <= 2.75, "{all} {near}");
        println!("ln: {:.2} ULP", all.max(near));
        for &level in Level::available().iter().filter(|&&level| level != Level::Reference) {
            let mut ends = vec![0.0, -0.0, f32::INFINITY, f32::NAN, -1.0, f32::NEG_INFINITY, 1.0, 2.0];
            ends.extend(ends.clone());
            f32::dispatch(level, Apply(&mut ends, Ln));
            assert_eq!(ends[..3], [f32::NEG_INFINITY, f32::NEG_INFINITY, f32::INFINITY], "{}", level.name());
            assert!(ends[3..6].iter().all(|v| v.is_nan()), "{ends:?} on {}", level.name());
            assert_eq!(ends[6..8], [0.0, std::f32::consts::LN_2]);
        }
    }

    #[test]
    fn numbers_split_into_a_factor_and_a_power() {
        for v in [1.0, 0.70, 0.71, 1.41, 1.42, 3e38, 1.2e-38, 1e300, 1e-300] {
            let ((m, n), (m32, n32)) = (Vector::split(v), Vector::split(v as f32));
            assert!((0.70..1.42).contains(&m) && m * n.exp2() == v, "{v} is {m} 2^{n}");
            let of_f32 = (1e-38..1e39).contains(&v);
            assert!(!of_f32 || m32 as f64 * (n32 as f64).exp2() == (v as f32) as f64, "{m32} 2^{n32}");
        }
    }

    #[test]
    fn erf_is_near_the_truth_everywhere() {
        for &level in Level::available().iter().filter(|&&level| level != Level::Reference) {
            let arguments: Vec<f32> = (-64000..64000).map(|i| i as f32 / 10000.0).collect();
            let mut results = arguments.clone();
            f32::dispatch(level, Apply(&mut results, Erf));
            for (&argument, &result) in arguments.iter().zip(&results) {
                let off = (result as f64 - libm::erf(argument as f64)).abs();
                assert!(off <= 4e-7, "erf({argument}) = {result} on {}", level.name());
            }
        }
    }

    #[test]
    fn the_ends_are_what_they_should_be() {
        for &level in Level::available().iter().filter(|&&level| level != Level::Reference) {
            let arguments = [0.0, -0.0, f32::NEG_INFINITY, f32::INFINITY, f32::NAN, -1e30, 1e30, 128.0];
            let mut results = [[arguments, arguments].concat(), vec![]].concat();
            f32::dispatch(level, Apply(&mut results, Exp2));
            assert_eq!(results[..4], [1.0, 1.0, 0.0, f32::INFINITY], "{}", level.name());
            assert!(results[4].is_nan());
            assert_eq!(results[5..8], [0.0, f32::INFINITY, f32::INFINITY], "{}", level.name());
        }
    }
}

mod partial {
    use sidewinder_kernels::cpu::vector::MAX_LANES;
    use sidewinder_kernels::cpu::{Level, Real, Vector, Work};

    /// The lanes that a vector loads from these values, and how many it has; then stores them.
    struct Copy<'a>(&'a [f32], &'a mut [f32]);

    impl Work<f32> for Copy<'_> {
        type Output = (Vec<f32>, usize);
        #[inline(always)]
        fn run<V: Vector<Element = f32>>(self) -> (Vec<f32>, usize) {
            let (mut lanes, vector) = ([f32::NAN; MAX_LANES], V::load_partial(self.0));
            vector.store(&mut lanes);
            vector.store_partial(self.1);
            (lanes[..V::LANES].to_vec(), V::LANES)
        }
    }

    #[test]
    fn lanes_past_the_end_are_zero_and_not_stored() {
        let values: Vec<f32> = (1..=20).map(|i| i as f32).collect();
        for &level in Level::available() {
            for count in 0..=values.len() {
                let mut to = [-1.0; 20];
                let (lanes, all) = f32::dispatch(level, Copy(&values[..count], &mut to[..count]));
                let expected = |i: usize| if i < count { values[i] } else { 0.0 };
                assert_eq!(lanes, (0..all).map(expected).collect::<Vec<_>>(), "{count} values on {level:?}");
                let stored = |i: usize| if i < count.min(all) { values[i] } else { -1.0 };
                assert_eq!(to[..], *(0..20).map(stored).collect::<Vec<_>>(), "{count} values on {level:?}");
            }
        }
    }
}

mod storage {
    use half::{bf16, f16};
    use sidewinder_kernels::cpu::storage::round_to_bf16;
    use sidewinder_kernels::cpu::{Level, Real, Storage, Vector, Work};

    /// Lower halves of f32 numbers: ties of both narrow types, and their neighbours.
    const LOW: [u32; 12] = [0, 1, 0xfff, 0x1000, 0x1001, 0x1fff, 0x2fff, 0x3000, 0x7fff, 0x8000, 0x8001, 0xffff];

    /// Numbers with every upper half: subnormal ones, infinities and NaNs of all kinds are among them. Three more make
    /// the last vector a part of one.
    fn numbers() -> Vec<f32> {
        let with = |high: u32| LOW.map(|low| f32::from_bits((high << 16) | low));
        (0..=u16::MAX as u32).flat_map(with).chain([0.1, 0.2, 0.3]).collect()
    }

    /// Converts a vector at a time.
    struct Convert<'a, A, B>(&'a [A], &'a mut [B]);

    impl<A: Storage<Wide = f32>, B: Storage<Wide = f32>> Work<f32> for Convert<'_, A, B> {
        type Output = ();
        #[inline(always)]
        fn run<V: Vector<Element = f32>>(self) {
            for (from, to) in self.0.chunks(V::LANES).zip(self.1.chunks_mut(V::LANES)) {
                B::store(A::load::<V>(from), to);
            }
        }
    }

    fn each_level_converts<S: Storage<Wide = f32>>(from_bits: fn(u16) -> S, bits: fn(S) -> u16, round: fn(f32) -> S) {
        let (narrow, wide): (Vec<S>, _) = ((0..=u16::MAX).chain([1, 2, 3]).map(from_bits).collect(), numbers());
        for &level in Level::available() {
            let mut widened = vec![0.0f32; narrow.len()];
            f32::dispatch(level, Convert(&narrow, &mut widened));
            for (value, got) in narrow.iter().zip(&widened) {
                assert_eq!(got.to_bits(), value.widen().to_bits(), "{:#x} on {level:?}", bits(*value));
            }
            let mut rounded = vec![S::from_f64(1.0); wide.len()];
            f32::dispatch(level, Convert(&wide, &mut rounded));
            for (value, got) in wide.iter().zip(&rounded) {
                assert_eq!(bits(*got), bits(round(*value)), "{:#x} on {level:?}", value.to_bits());
            }
        }
    }

    #[test]
    fn bf16_rounds_as_the_half_crate_does() {
        for value in numbers() {
            let (ours, theirs) = (round_to_bf16(value), bf16::from_f32(value));
            assert_eq!(ours.to_bits(), theirs.to_bits(), "{value} {:#x}", value.to_bits());
        }
    }

    #[test]
    fn each_level_converts_bf16_bit_by_bit() {
        each_level_converts(bf16::from_bits, bf16::to_bits, round_to_bf16);
    }

    #[test]
    fn each_level_converts_f16_bit_by_bit() {
        each_level_converts(f16::from_bits, f16::to_bits, f16::from_f32);
    }
}

mod panels {
    use half::bf16;
    use sidewinder_kernels::cpu::matrix::Matrix;
    use sidewinder_kernels::cpu::panels::Panels;
    use sidewinder_kernels::cpu::pool::Shared;
    use sidewinder_kernels::cpu::{Exec, Level};

    #[test]
    fn products_are_right_for_all_sizes_and_levels() {
        for (rows, inner, vectors) in
            [(1, 1, 1), (5, 3, 2), (67, 33, 3), (64, 16, 4), (5, 2, 150), (130, 7, 9), (0, 3, 1)]
        {
            let matrix: Vec<bf16> = (0..rows * inner).map(|i| bf16::from_f64((i % 13) as f64 - 6.0)).collect();
            let factors: Vec<f32> = (0..vectors * inner).map(|i| (i % 7) as f32 - 3.0).collect();
            for &level in Level::available() {
                let exec = Exec { level, threads: 2 };
                let panels = Panels::pack(Matrix::new(&matrix, rows, inner), &exec).unwrap();
                let mut got = vec![1.0f32; vectors * rows];
                for add in [false, true] {
                    let to = Shared::new(&mut got);
                    // SAFETY: panels are multiplied one after the other.
                    (0..panels.count()).for_each(|panel| unsafe { panels.multiply(panel, &factors, &to, add) });
                }
                panels.add_all(&factors, &mut got, 2).unwrap();
                for (i, got) in got.iter().enumerate() {
                    let (vector, row) = (i / rows, i % rows);
                    let terms = (0..inner).map(|k| matrix[row * inner + k].to_f32() * factors[vector * inner + k]);
                    let expected = 3.0 * terms.sum::<f32>();
                    assert_eq!(*got, expected, "{rows} {inner} {vectors} {level:?}");
                }
            }
        }
    }
}

mod pool {
    use sidewinder_kernels::cpu::pool::{awake, for_each, worth};
    use sidewinder_kernels::cpu::team;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn every_number_comes_once() {
        for threads in [1, 2, 3, 7, 16] {
            for count in [0, 1, 2, 3, 8, 13, 1000] {
                let times: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                let add = |i: usize| _ = times[i].fetch_add(1, Ordering::Relaxed);
                for_each(threads, count, add).unwrap();
                let times: Vec<usize> = times.into_iter().map(AtomicUsize::into_inner).collect();
                assert_eq!(times, vec![1; count], "{threads} threads");
            }
        }
    }

    #[test]
    fn so_it_does_where_threads_are_awake() {
        for threads in [1, 2, 3, 7] {
            awake(threads, || (0..100).for_each(|_| every_number_comes_once())).unwrap();
        }
    }

    #[test]
    fn threads_that_are_awake_share_small_work() {
        assert_eq!([worth(2, 99, 100), worth(2, 100, 100)], [1, 2]);
        assert_eq!(awake(2, || [worth(2, 2, 100), worth(2, 3, 100)]).unwrap(), [1, 2]);
        assert_eq!(worth(2, 3, 100), 1);
    }

    #[test]
    fn a_panic_reaches_a_caller_whose_threads_are_awake() {
        for first in [0, 99] {
            let fail = |i: usize| assert!((i == 99) != (first == 99), "this one fails");
            let failed = std::panic::catch_unwind(|| awake(2, || for_each(2, 100, fail)));
            assert!(failed.is_err());
        }
        assert!(!team::is_there());
        so_it_does_where_threads_are_awake();
    }

    #[test]
    fn calls_within_calls_and_from_many_threads_end() {
        let total = AtomicUsize::new(0);
        let add = |_| _ = total.fetch_add(1, Ordering::Relaxed);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| for_each(3, 5, |_| for_each(3, 7, add).unwrap()).unwrap());
            }
        });
        assert_eq!(total.into_inner(), 8 * 5 * 7);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_spoils_nothing() {
        let failed = std::panic::catch_unwind(|| for_each(2, 100, |i| assert_ne!(i, 60)));
        assert!(failed.is_err());
        every_number_comes_once();
    }
}

mod team {
    use sidewinder_kernels::cpu::team::Crew;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;
    use std::time::Duration;

    #[test]
    fn a_crew_wakes_for_each_call() {
        for cores in [1, 3] {
            let crew = Crew::new(3, cores).unwrap();
            for pause in [0, 0, 0, 100, 150, 200, 1000].repeat(30) {
                thread::sleep(Duration::from_micros(pause));
                let all = Barrier::new(3);
                assert!(crew.run(3, &|_| _ = all.wait()));
            }
        }
    }

    #[test]
    fn a_crew_has_one_caller_at_a_time() {
        let crew = Crew::new(2, 2).unwrap();
        let within = AtomicUsize::new(0);
        assert!(crew.run(2, &|_| _ = within.fetch_add(usize::from(crew.run(2, &|_| ())), Ordering::Relaxed)));
        assert_eq!(within.into_inner(), 0);
        assert!(std::panic::catch_unwind(|| crew.run(2, &|_| panic!("this one fails"))).is_err());
        assert!(crew.run(2, &|_| ()));
    }
}
