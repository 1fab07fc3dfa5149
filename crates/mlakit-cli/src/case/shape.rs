//! The table of an operation's tensors: names, dtypes and axes, checked against each other and
//! against the spec.

use std::collections::BTreeMap;

use mlakit::Dtype;
use serde_json::{Map, Value};

use super::tensor::{Tensor, Tensors, file_dtype};
use crate::failure::Failure;

/// One axis of a tensor.
#[derive(Clone, Copy, Debug)]
pub enum Axis {
    /// A size with a name: the same for all tensors of a case that have it.
    Of(&'static str),
    /// One more than that.
    OneMore(&'static str),
    /// Just this.
    Exactly(usize),
}

/// One tensor of a table.
#[derive(Clone, Copy, Debug)]
pub struct TensorRule {
    /// Its name.
    pub name: &'static str,
    /// The dtypes that it may have.
    pub dtypes: &'static [Dtype],
    /// Its axes.
    pub axes: &'static [Axis],
    /// Whether every case has it; for the others the Spec decides.
    pub required: bool,
}

/// The tensors of an operation, and which fields of its Spec are sizes of them.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    /// The inputs.
    pub inputs: &'static [TensorRule],
    /// Fields that equal a size; where they are absent, the size is the field.
    pub equal: &'static [(&'static str, &'static str)],
    /// Fields that bound a size; where they are absent, the size is the bound.
    pub capacity: &'static [(&'static str, &'static str)],
}

/// The sizes of a case, by name, each with what gave it: a tensor, or what the case is for.
#[derive(Clone, Debug, Default)]
pub struct Dims {
    sizes: BTreeMap<&'static str, (usize, &'static str)>,
    /// What the case is for: a spec, a model.
    fits: &'static str,
}

impl Dims {
    /// A size; 0 for one that no tensor of the case has.
    pub fn of(&self, name: &str) -> usize {
        self.sizes.get(name).map_or(0, |(size, _)| *size)
    }

    /// Whether some tensor or the spec gave it.
    pub fn has(&self, name: &str) -> bool {
        self.sizes.contains_key(name)
    }

    fn expected(&self, axis: Axis) -> Option<usize> {
        match axis {
            Axis::Of(name) => self.sizes.get(name).map(|(size, _)| *size),
            Axis::OneMore(name) => self.sizes.get(name).map(|(size, _)| size.saturating_add(1)),
            Axis::Exactly(size) => Some(size),
        }
    }

    fn bind(&mut self, axis: Axis, size: usize, tensor: &'static str) -> bool {
        let (name, size) = match (self.expected(axis), axis) {
            (Some(needed), _) => return needed == size,
            (None, Axis::Of(name)) => (name, size),
            (None, Axis::OneMore(name)) if size > 0 => (name, size - 1),
            (None, _) => return false,
        };
        self.sizes.insert(name, (size, tensor)).is_none()
    }

    fn describe(&self, axis: Axis) -> String {
        let (name, more) = match axis {
            Axis::Of(name) => (name, ""),
            Axis::OneMore(name) => (name, "+1"),
            Axis::Exactly(size) => return size.to_string(),
        };
        match (self.expected(axis), self.sizes.get(name)) {
            (Some(size), Some((_, from))) => format!("{name}{more}={size} ({from})"),
            _ => format!("{name}{more}"),
        }
    }
}

impl Table {
    /// Checks every tensor, finds the sizes, and fills the fields of `spec` that are absent.
    ///
    /// # Errors
    /// The first tensor that is unknown, absent, or of another dtype or shape, by name, with what
    /// was needed and what was given.
    pub fn check(
        &self,
        spec: &mut Map<String, Value>,
        tensors: &Tensors<'_>,
    ) -> Result<Dims, Failure> {
        self.check_against("spec", spec, tensors)
    }

    /// As [`Table::check`], where the fields are those of something else than a spec, which errors
    /// call `fits`.
    ///
    /// # Errors
    /// As [`Table::check`].
    pub fn check_against(
        &self,
        fits: &'static str,
        spec: &mut Map<String, Value>,
        tensors: &Tensors<'_>,
    ) -> Result<Dims, Failure> {
        let known = |name: &&str| self.inputs.iter().any(|rule| rule.name == *name);
        if let Some(name) = tensors.names().find(|name| !known(name)) {
            let names: Vec<_> = self.inputs.iter().map(|rule| rule.name).collect();
            return Err(Failure::input(
                format!("tensor `{name}`: needed one of {}", names.join(", ")),
                "remove it from the case, or correct its name",
            ));
        }
        let mut dims = Dims { fits, ..Dims::default() };
        for (field, size) in self.equal {
            if let Some(value) = number(spec, field) {
                dims.sizes.insert(size, (value, fits));
            }
        }
        for rule in self.inputs {
            match tensors.find(rule.name) {
                Some(tensor) => rule.check(tensor, &mut dims)?,
                None if rule.required => return Err(rule.absent(&dims)),
                None => {}
            }
        }
        self.fill(spec, &dims)?;
        Ok(dims)
    }

    fn fill(&self, spec: &mut Map<String, Value>, dims: &Dims) -> Result<(), Failure> {
        for (field, size) in self.equal.iter().filter(|(_, size)| dims.has(size)) {
            spec.entry(*field).or_insert_with(|| dims.of(size).into());
        }
        for (field, size) in self.capacity.iter().filter(|(_, size)| dims.has(size)) {
            let given = dims.of(size);
            if let Some(capacity) = number(spec, field).filter(|capacity| *capacity < given) {
                let axis = |axis: &Axis| matches!(axis, Axis::Of(name) if name == size);
                let tensor = self.inputs.iter().find(|rule| rule.axes.iter().any(axis));
                let name = tensor.map_or(*size, |rule| rule.name);
                return Err(Failure::input(
                    format!(
                        "tensor `{name}`: needed {size} <= {field} = {capacity}, given {given}"
                    ),
                    format!("raise or remove `{field}` in the spec"),
                ));
            }
            // An empty tensor still has a capacity: one.
            spec.entry(*field).or_insert_with(|| given.max(1).into());
        }
        Ok(())
    }
}

impl TensorRule {
    /// One that every case has.
    pub const fn needed(
        name: &'static str,
        dtypes: &'static [Dtype],
        axes: &'static [Axis],
    ) -> Self {
        Self { name, dtypes, axes, required: true }
    }

    /// One that only some cases have.
    pub const fn optional(
        name: &'static str,
        dtypes: &'static [Dtype],
        axes: &'static [Axis],
    ) -> Self {
        Self { name, dtypes, axes, required: false }
    }

    fn check(&self, tensor: &Tensor<'_>, dims: &mut Dims) -> Result<(), Failure> {
        let dtype = self.dtypes.iter().any(|dtype| file_dtype(*dtype) == tensor.dtype);
        let needed = self.describe(dims);
        let fits = tensor.shape.len() == self.axes.len()
            && self
                .axes
                .iter()
                .zip(&tensor.shape)
                .all(|(axis, size)| dims.bind(*axis, *size, self.name));
        if dtype && fits {
            return Ok(());
        }
        Err(Failure::input(
            format!("tensor `{}`: needed {needed}, given {}", self.name, tensor.kind()),
            format!("change the tensor, or what in the {} gives the size", dims.fits),
        ))
    }

    fn absent(&self, dims: &Dims) -> Failure {
        Failure::input(
            format!("tensor `{}`: needed {}, given nothing", self.name, self.describe(dims)),
            "add it to the case",
        )
    }

    fn describe(&self, dims: &Dims) -> String {
        let dtypes: Vec<_> = self.dtypes.iter().map(|dtype| dtype.name()).collect();
        let axes: Vec<_> = self.axes.iter().map(|axis| dims.describe(*axis)).collect();
        format!("{} [{}]", dtypes.join(" or "), axes.join(", "))
    }
}

/// A field that is a size. Anything else is left to the reader of the Spec, which says what is
/// wrong with it.
pub fn number(spec: &Map<String, Value>, field: &str) -> Option<usize> {
    spec.get(field).and_then(Value::as_u64).and_then(|value| usize::try_from(value).ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const TABLE: Table = Table {
        inputs: &[
            TensorRule::needed("x", &[Dtype::Bf16], &[Axis::Of("R"), Axis::Of("H")]),
            TensorRule::optional("ends", &[Dtype::I32], &[Axis::OneMore("B")]),
            TensorRule::optional("lens", &[Dtype::I32], &[Axis::Of("B")]),
        ],
        equal: &[("heads", "H")],
        capacity: &[("max_rows", "R"), ("max_batch", "B")],
    };

    /// A tensor of zeros.
    type Zeros = (&'static str, Dtype, &'static [usize]);

    fn check(spec: Value, shapes: &[Zeros]) -> Result<Map<String, Value>, String> {
        let Value::Object(mut spec) = spec else { panic!("an object") };
        let mut tensors = Tensors::default();
        for (name, dtype, shape) in shapes {
            let bytes = vec![0u8; shape.iter().product::<usize>() * dtype.bytes()];
            tensors.insert(*name, Tensor::new(*dtype, shape.to_vec(), &bytes));
        }
        TABLE.check(&mut spec, &tensors).map(|_| spec).map_err(|f| f.message().to_owned())
    }

    #[test]
    fn absent_fields_come_from_the_shapes() {
        let spec = check(json!({}), &[("x", Dtype::Bf16, &[3, 5]), ("ends", Dtype::I32, &[3])]);
        assert_eq!(
            Value::Object(spec.unwrap()),
            json!({"heads": 5, "max_rows": 3, "max_batch": 2})
        );
        let empty = check(json!({"max_rows": 9}), &[("x", Dtype::Bf16, &[0, 5])]).unwrap();
        assert_eq!(Value::Object(empty), json!({"heads": 5, "max_rows": 9}));
    }

    #[test]
    fn errors_name_the_tensor_what_was_needed_and_what_was_given() {
        let x: Zeros = ("x", Dtype::Bf16, &[3, 5]);
        let tries: [(Value, Vec<Zeros>, &str); 8] = [
            (json!({}), vec![], "tensor `x`: needed BF16 [R, H], given nothing"),
            (
                json!({"heads": 4}),
                vec![x],
                "tensor `x`: needed BF16 [R, H=4 (spec)], given BF16 [3, 5]",
            ),
            (
                json!({}),
                vec![("x", Dtype::F32, &[3, 5])],
                "tensor `x`: needed BF16 [R, H], given F32 [3, 5]",
            ),
            (
                json!({}),
                vec![("x", Dtype::Bf16, &[15])],
                "tensor `x`: needed BF16 [R, H], given BF16 [15]",
            ),
            (
                json!({}),
                vec![x, ("ends", Dtype::I32, &[0])],
                "tensor `ends`: needed I32 [B+1], given I32 [0]",
            ),
            (
                json!({}),
                vec![x, ("y", Dtype::I32, &[1])],
                "tensor `y`: needed one of x, ends, lens",
            ),
            (
                json!({}),
                vec![x, ("ends", Dtype::I32, &[3]), ("lens", Dtype::I32, &[4])],
                "tensor `lens`: needed I32 [B=2 (ends)], given I32 [4]",
            ),
            (json!({"max_rows": 2}), vec![x], "tensor `x`: needed R <= max_rows = 2, given 3"),
        ];
        for (spec, tensors, needed) in tries {
            assert_eq!(check(spec, &tensors).unwrap_err(), needed);
        }
    }
}
