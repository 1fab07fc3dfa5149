//! How a checkpoint stores its weights: `quantization_config`.

use super::MAX_HEAD_WIDTH;
use super::fields::Fields;
use crate::error::ConfigError;

/// What a file says of quantised weights. Reading such weights is not in this version; what they
/// take is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quantization {
    /// `quant_method`; empty where the file names none.
    pub method: String,
    /// `weight_block_size`, rows and columns: the part of a matrix that has one scale. `None` where
    /// a matrix has one.
    pub block: Option<[usize; 2]>,
    /// `modules_to_not_convert`: parts of names of modules whose weights are plain.
    pub plain_modules: Vec<String>,
}

impl Quantization {
    /// Whether it is the form of the DeepSeek checkpoints: the matrices of attention, MLPs and
    /// experts are FP8 of one byte with F32 scales (`weight_scale_inv`); embeddings, router, norms,
    /// biases and head are BF16.
    pub fn is_fp8(&self) -> bool {
        self.method == "fp8"
    }
}

/// The object `quantization_config`, where there is one.
pub(super) fn quantization(fields: Fields<'_>) -> Result<Option<Quantization>, ConfigError> {
    const KEY: &str = "quantization_config";
    let Some(object) = fields.object(KEY)? else { return Ok(None) };
    let path = fields.name(KEY);
    let inner = Fields::new(object, &path);
    const BLOCK: &str = "weight_block_size";
    let block = inner.array(BLOCK)?.map(|sizes| {
        let size = |value: &serde_json::Value| {
            let size = usize::try_from(value.as_u64()?).ok()?;
            (1..=MAX_HEAD_WIDTH).contains(&size).then_some(size)
        };
        match sizes {
            [rows, columns] => Some([size(rows)?, size(columns)?]),
            _ => None,
        }
    });
    let needed = || format!("two integers from 1 to {MAX_HEAD_WIDTH}");
    let block = block.map(|block| block.ok_or_else(|| inner.invalid(BLOCK, needed())));
    let modules = inner.array("modules_to_not_convert")?.unwrap_or_default();
    Ok(Some(Quantization {
        method: inner.text("quant_method")?.unwrap_or_default().to_owned(),
        block: block.transpose()?,
        plain_modules: modules.iter().filter_map(|m| m.as_str().map(str::to_owned)).collect(),
    }))
}
