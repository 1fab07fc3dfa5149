//! The Hadamard transform against its definition; rows whatever their company; twice is nothing.

use half::bf16;
use mlakit::op::hadamard::{Hadamard, HadamardArgs, HadamardFields, HadamardSpec, oracle};
use mlakit::op::layer::Float;

use super::compare::bf16_unit;
use super::dense_run::tensor;
use super::indexer_run::IndexerDevice;
use super::layer::{Tensor, prepare, run};
use super::random::Rng;

fn transform<D: IndexerDevice>(device: &D, spec: &HadamardSpec, x: &[f32]) -> Vec<f32> {
    let prepared = prepare::<Hadamard, D>(device, spec);
    let x_tensor = Tensor::new(device, spec.input, (0, x));
    let y = tensor::<bf16, D>(device, &vec![bf16::NAN; x.len()]);
    run(device, &prepared, |lane| {
        prepared.bind(HadamardArgs {
            x: x_tensor.input(),
            y: (&y.lease()).into(),
            scratch: lane.lease(),
        })
    });
    y.read().unwrap().into_iter().map(bf16::to_f32).collect()
}

pub fn agrees_with_the_definition<D: IndexerDevice>(device: &D) {
    let mut rng = Rng(4);
    for width in [1, 2, 32, 128, 1024] {
        for input in [Float::Bf16, Float::F32] {
            let spec = HadamardSpec::new(HadamardFields { width, input, max_rows: 9 }).unwrap();
            let mut x = rng.normals(9 * width);
            x.iter_mut().for_each(|v| *v = input.round(f64::from(*v)));
            let (given, needed) = (transform(device, &spec, &x), oracle(&spec, &x));
            for (i, (g, n)) in given.iter().zip(&needed).enumerate() {
                let close = (f64::from(*g) - n).abs() <= bf16_unit(*n) + 1e-5;
                assert!(close, "{i} of {spec:?}: given {g}, needed {n}");
            }
            for row in [0, 5] {
                let own = row * width..(row + 1) * width;
                let alone = transform(device, &spec, &x[own.clone()]);
                assert_eq!(alone, given[own], "row {row} of {spec:?}");
            }
            let whole: Vec<f32> = (0..width).map(|i| (i % 9) as f32 - 4.0).collect();
            let twice = transform(device, &spec, &transform(device, &spec, &whole));
            for (i, (g, n)) in twice.iter().zip(&whole).enumerate() {
                assert!((g - n).abs() < 0.1, "{i} of {spec:?}: given {g}, needed {n}");
            }
        }
    }
}
