//! `embed` on the host, bit by bit.

use super::spec::EmbedSpec;

/// What the oracle says.
#[derive(Clone, Debug, PartialEq)]
pub struct EmbedResult {
    /// `[R, width]`, the F32 products; `y` is these, rounded to its dtype.
    pub y: Vec<f32>,
    /// Ids that are neither padding nor a row of the table.
    pub faults: u32,
}

/// The result from the table `[vocab, width]` and the ids `[R]`.
pub fn oracle(spec: &EmbedSpec, table: &[f32], ids: &[i32]) -> EmbedResult {
    let vocab = spec.vocab.unwrap_or(table.len() / spec.width);
    let mut result = EmbedResult { y: Vec::with_capacity(ids.len() * spec.width), faults: 0 };
    for id in ids {
        let row = usize::try_from(*id).ok().filter(|id| *id < vocab);
        match row {
            Some(row) => {
                let row = &table[row * spec.width..][..spec.width];
                result.y.extend(row.iter().map(|v| v * spec.scale.value()));
            }
            None => {
                result.y.resize(result.y.len() + spec.width, 0.0);
                result.faults += u32::from(*id != -1);
            }
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_gathered_and_strange_ids_counted() {
        let text = r#"{"width":2,"table":"f32","output":"f32","scale":0.5,"max_rows":9}"#;
        let open: EmbedSpec = serde_json::from_str(text).unwrap();
        let text = text.replace(r#""table""#, r#""vocab":2,"table""#);
        let closed: EmbedSpec = serde_json::from_str(&text).unwrap();
        let table = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let ids = [1, -1, 2, 0, -2, i32::MAX];
        let result = oracle(&open, &table, &ids);
        assert_eq!(result.y, [1.5, 2.0, 0.0, 0.0, 2.5, 3.0, 0.5, 1.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(result.faults, 2);
        // The third row is in the memory, but not in the vocabulary.
        let result = oracle(&closed, &table, &ids);
        assert_eq!(result.y, [1.5, 2.0, 0.0, 0.0, 0.0, 0.0, 0.5, 1.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(result.faults, 3);
    }
}
