//! How many weights a model has, by what they are for and by how tensor parallelism divides them.

use mlakit_model::config::{ExpertsConfig, GateKind, QueryRank};
use mlakit_model::{AttentionConfig, MlpConfig, ModelConfig};

/// Elements of one kind of weight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Divided among the devices: by heads, experts, widths or ids.
    pub divided: u128,
    /// On every device.
    pub replicated: u128,
}

impl Count {
    /// In all, on one device.
    pub fn total(self) -> u128 {
        self.divided + self.replicated
    }

    /// On each of `devices`.
    pub fn each(self, devices: usize) -> u128 {
        self.divided.div_ceil(devices as u128) + self.replicated
    }

    fn add(&mut self, other: Self) {
        self.divided += other.divided;
        self.replicated += other.replicated;
    }
}

/// The weights of a model by what they are for, in the order of a step. Every tensor that a layer
/// of the config reads is counted once; draft layers are not. Absorbed forms of `kv_b_proj` have as
/// many elements as itself.
pub fn count(config: &ModelConfig) -> Vec<(&'static str, Count)> {
    let product = |a: usize, b: usize| a as u128 * b as u128;
    let hidden = config.hidden_size;
    let vocabulary = product(config.vocab_size, hidden);
    let head = if config.tie_word_embeddings { 0 } else { vocabulary };
    let (mut attention, mut indexer, mut dense) = <(Count, Count, Count)>::default();
    let (mut router, mut experts, mut shared) = <(Count, Count, Count)>::default();
    for layer in &config.layers {
        attention.add(attention_weights(&layer.attention, hidden));
        indexer.add(indexer_weights(&layer.attention, hidden));
        match &layer.mlp {
            MlpConfig::Dense { width } => dense.add(mlp(hidden, *width, config.mlp_bias)),
            MlpConfig::Experts(kind) => {
                router.add(router_weights(kind, hidden));
                let one = mlp(hidden, kind.expert_width, false).total();
                let all = one * kind.router.experts as u128;
                experts.add(Count { divided: all, replicated: 0 });
                shared.add(mlp(hidden, kind.shared_width, false));
            }
        }
    }
    let norms = product(2 * config.layers.len() + 1, hidden);
    vec![
        ("embedding", Count { divided: vocabulary, replicated: 0 }),
        ("attention", attention),
        ("indexer", indexer),
        ("dense MLP", dense),
        ("router", router),
        ("experts", experts),
        ("shared experts", shared),
        ("norms", Count { divided: 0, replicated: norms }),
        ("output head", Count { divided: head, replicated: 0 }),
    ]
}

fn attention_weights(attention: &AttentionConfig, hidden: usize) -> Count {
    let product = |a: usize, b: usize| a as u128 * b as u128;
    let queries = attention.heads * attention.qk_head_dim();
    let values = attention.heads * attention.v_head_dim;
    let expanded = attention.heads * (attention.qk_nope_head_dim + attention.v_head_dim);
    let bias = |width: usize| if attention.bias { width as u128 } else { 0 };
    let (query, latent) = match attention.query_rank {
        QueryRank::Rank(rank) => {
            (product(queries, rank), product(rank, hidden) + bias(rank) + rank as u128)
        }
        QueryRank::ByTensor => (product(queries, hidden), 0),
    };
    let gate = match attention.gate {
        None => 0,
        Some(GateKind::PerHead) => product(attention.heads, hidden),
        Some(GateKind::PerElement) => product(values, hidden),
    };
    let cached = attention.cache_width();
    let norm = attention.kv_lora_rank as u128;
    Count {
        divided: query + product(expanded, attention.kv_lora_rank) + product(values, hidden) + gate,
        replicated: latent + product(cached, hidden) + bias(cached) + norm + bias(hidden),
    }
}

fn indexer_weights(attention: &AttentionConfig, hidden: usize) -> Count {
    let (Some(indexer), QueryRank::Rank(rank)) = (attention.indexer, attention.query_rank) else {
        return Count::default();
    };
    let product = |a: usize, b: usize| a as u128 * b as u128;
    let (query, key) = (product(indexer.heads * indexer.head_dim, rank), indexer.head_dim);
    let key = product(key, hidden) + 2 * key as u128;
    Count { divided: 0, replicated: query + key + product(indexer.heads, hidden) }
}

fn mlp(hidden: usize, width: usize, bias: bool) -> Count {
    let matrices = 3 * hidden as u128 * width as u128;
    let biases = if bias { (2 * width as u128, hidden as u128) } else { (0, 0) };
    Count { divided: matrices + biases.0, replicated: biases.1 }
}

fn router_weights(experts: &ExpertsConfig, hidden: usize) -> Count {
    let router = &experts.router;
    let bias = if router.correction_bias { router.experts as u128 } else { 0 };
    Count { divided: 0, replicated: router.experts as u128 * hidden as u128 + bias }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::SafeTensors;

    /// What is computed from the config is what the checkpoint holds.
    #[test]
    fn the_count_is_that_of_a_real_checkpoint() {
        let files = mlakit_model::embedded::tiny_dsa();
        let config = ModelConfig::from_json(files.config).unwrap();
        let (_, header) = SafeTensors::read_metadata(files.weights).unwrap();
        // The decoder layers come first; draft layers follow them and are not counted.
        let draft = format!("model.layers.{}.", config.layers.len());
        let held: u128 = header
            .tensors()
            .iter()
            .filter(|(name, _)| !name.starts_with(&draft))
            .map(|(_, info)| info.shape.iter().product::<usize>() as u128)
            .sum();
        let counted: u128 = count(&config).iter().map(|(_, count)| count.total()).sum();
        assert_eq!(counted, held);
    }

    #[test]
    fn devices_share_what_is_divided() {
        let count = Count { divided: 10, replicated: 3 };
        assert_eq!((count.total(), count.each(1), count.each(4)), (13, 13, 6));
    }
}
