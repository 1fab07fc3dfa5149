//! How many weights a model has, by what they are for and by how tensor parallelism divides them.

use mlakit_model::config::{AttentionKind, ExpertsConfig, GateKind, QueryRank};
use mlakit_model::{AttentionConfig, MlpConfig, ModelConfig};

/// A number of one kind of thing: elements, scales.
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

    /// On each of `devices`; on the one with the most, where they cannot share evenly.
    pub fn each(self, devices: usize) -> u128 {
        self.divided.div_ceil(devices as u128) + self.replicated
    }

    /// Whether each of `devices` has as much.
    pub fn is_even(self, devices: usize) -> bool {
        self.divided.is_multiple_of(devices as u128)
    }
}

/// The weights of a model that are for one thing.
#[derive(Clone, Debug)]
pub struct Weights {
    /// What they are for.
    pub what: &'static str,
    tensors: Vec<Tensor>,
}

impl Weights {
    /// Elements of all tensors.
    pub fn elements(&self) -> Count {
        self.sum(|tensor| tensor.elements())
    }

    /// Elements of the tensors that a quantised checkpoint quantises.
    pub fn quantised(&self) -> Count {
        self.sum(|tensor| if tensor.quantised { tensor.elements() } else { 0 })
    }

    /// The scales of those tensors: one for each block of so many rows and columns, or one a tensor.
    pub fn scales(&self, block: Option<[usize; 2]>) -> Count {
        self.sum(|tensor| {
            let [rows, columns] = block.unwrap_or([tensor.rows.max(1), tensor.columns.max(1)]);
            let blocks = product(tensor.rows.div_ceil(rows), tensor.columns.div_ceil(columns));
            if tensor.quantised { tensor.copies as u128 * blocks } else { 0 }
        })
    }

    fn sum(&self, of: impl Fn(&Tensor) -> u128) -> Count {
        let mut count = Count::default();
        for tensor in &self.tensors {
            let part = if tensor.divided { &mut count.divided } else { &mut count.replicated };
            *part += of(tensor);
        }
        count
    }
}

/// Tensors of one shape.
#[derive(Clone, Copy, Debug)]
struct Tensor {
    rows: usize,
    columns: usize,
    copies: usize,
    divided: bool,
    quantised: bool,
}

impl Tensor {
    /// A matrix that devices divide, and that quantised checkpoints quantise.
    fn divided(rows: usize, columns: usize) -> Self {
        Self { rows, columns, copies: 1, divided: true, quantised: true }
    }

    /// The same on every device.
    fn replicated(rows: usize, columns: usize) -> Self {
        Self { divided: false, ..Self::divided(rows, columns) }
    }

    /// A norm or a bias.
    fn vector(width: usize) -> Self {
        Self::replicated(1, width).plain()
    }

    /// Kept as plain numbers by quantised checkpoints.
    fn plain(self) -> Self {
        Self { quantised: false, ..self }
    }

    /// So many of each.
    fn times(self, copies: usize) -> Self {
        Self { copies: self.copies * copies, ..self }
    }

    fn elements(&self) -> u128 {
        self.copies as u128 * product(self.rows, self.columns)
    }
}

fn product(a: usize, b: usize) -> u128 {
    a as u128 * b as u128
}

/// The weights of a model by what they are for, in the order of a step. Every tensor that a layer
/// of the config reads is counted once; draft layers are not. Absorbed forms of `kv_b_proj` have as
/// many elements as itself.
pub fn count(config: &ModelConfig) -> Vec<Weights> {
    let hidden = config.hidden_size;
    let vocabulary = Tensor::divided(config.vocab_size, hidden).plain();
    let head = if config.tie_word_embeddings { vec![] } else { vec![vocabulary] };
    let (mut attention, mut indexer, mut dense) = (vec![], vec![], vec![]);
    let (mut router, mut experts, mut shared) = (vec![], vec![], vec![]);
    for layer in &config.layers {
        if layer.kind == AttentionKind::Latent {
            attention.extend(attention_weights(&layer.attention, hidden));
            indexer.extend(indexer_weights(&layer.attention, hidden));
        }
        match &layer.mlp {
            MlpConfig::Dense { width } => dense.extend(mlp(hidden, *width, config.mlp_bias)),
            MlpConfig::Experts(kind) => {
                router.extend(router_weights(kind, hidden));
                let one = mlp(hidden, kind.expert_width, false);
                experts.extend(one.into_iter().map(|tensor| tensor.times(kind.router.experts)));
                shared.extend(mlp(hidden, kind.shared_width, false));
            }
        }
    }
    let norms = vec![Tensor::vector(hidden).times(2 * config.layers.len() + 1)];
    let of = |what, tensors| Weights { what, tensors };
    vec![
        of("embedding", vec![vocabulary]),
        of("attention", attention),
        of("indexer", indexer),
        of("dense MLP", dense),
        of("router", router),
        of("experts", experts),
        of("shared experts", shared),
        of("norms", norms),
        of("output head", head),
    ]
}

fn attention_weights(attention: &AttentionConfig, hidden: usize) -> Vec<Tensor> {
    let queries = attention.heads * attention.qk_head_dim();
    let values = attention.heads * attention.v_head_dim;
    let expanded = attention.heads * (attention.qk_nope_head_dim + attention.v_head_dim);
    let (latent, cached) = (attention.kv_lora_rank, attention.cache_width());
    let mut tensors = vec![
        Tensor::replicated(cached, hidden),
        Tensor::vector(latent),
        Tensor::divided(expanded, latent),
        Tensor::divided(hidden, values),
    ];
    let mut biases = vec![cached, hidden];
    match attention.query_rank {
        QueryRank::Rank(rank) => {
            tensors.extend([
                Tensor::replicated(rank, hidden),
                Tensor::vector(rank),
                Tensor::divided(queries, rank),
            ]);
            biases.push(rank);
        }
        QueryRank::ByTensor => tensors.push(Tensor::divided(queries, hidden)),
    }
    if attention.bias {
        tensors.extend(biases.into_iter().map(Tensor::vector));
    }
    tensors.extend(attention.gate.map(|gate| {
        let rows = match gate {
            GateKind::PerHead => attention.heads,
            GateKind::PerElement | GateKind::ByTensor => values,
        };
        Tensor::divided(rows, hidden)
    }));
    tensors
}

/// Query and key projections, the layer norm of the key, and the weights of the heads, which stay
/// plain numbers.
fn indexer_weights(attention: &AttentionConfig, hidden: usize) -> Vec<Tensor> {
    let (Some(indexer), QueryRank::Rank(rank)) = (attention.own_indexer(), attention.query_rank)
    else {
        return Vec::new();
    };
    let mut tensors = vec![
        Tensor::replicated(indexer.heads * indexer.head_dim, rank),
        Tensor::replicated(indexer.head_dim, hidden),
        Tensor::vector(indexer.head_dim).times(2),
        Tensor::replicated(indexer.heads, hidden).plain(),
    ];
    tensors.extend(indexer.pool.iter().flat_map(|pool| {
        let gate = Tensor::replicated(indexer.head_dim, hidden);
        [gate, Tensor::replicated(pool.size, indexer.head_dim).plain()]
    }));
    tensors
}

fn mlp(hidden: usize, width: usize, bias: bool) -> Vec<Tensor> {
    let mut tensors = vec![Tensor::divided(width, hidden).times(2), Tensor::divided(hidden, width)];
    if bias {
        let inner = Tensor::divided(2, width).plain();
        tensors.extend([inner, Tensor::vector(hidden)]);
    }
    tensors
}

fn router_weights(experts: &ExpertsConfig, hidden: usize) -> Vec<Tensor> {
    let router = &experts.router;
    let bias = router.correction_bias.then(|| Tensor::vector(router.experts));
    std::iter::once(Tensor::replicated(router.experts, hidden).plain()).chain(bias).collect()
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
        let weights = count(&config);
        let counted: u128 = weights.iter().map(|weights| weights.elements().total()).sum();
        assert_eq!(counted, held);
        // Vectors are not quantised, nor are the embedding, the router, the norms and the head.
        let plain = |what: &str| {
            let weights = weights.iter().find(|weights| weights.what == what).unwrap();
            weights.elements().total() - weights.quantised().total()
        };
        assert_eq!(plain("attention"), 3 * (512 + 192));
        assert_eq!(plain("indexer"), 3 * (2 * 128 + 4 * 256));
        assert_eq!((plain("embedding"), plain("router")), (258 * 256, 2 * (8 * 256 + 8)));
        assert_eq!(plain("experts") + plain("shared experts") + plain("dense MLP"), 0);
    }

    #[test]
    fn devices_share_what_is_divided() {
        let count = Count { divided: 10, replicated: 3 };
        assert_eq!((count.total(), count.each(1), count.each(4)), (13, 13, 6));
        assert!(count.is_even(5) && !count.is_even(4));
    }

    /// A block that reaches beyond the edge of a matrix has a scale too.
    #[test]
    fn scales_cover_every_matrix() {
        let tensors = vec![
            Tensor::divided(576, 7168).times(3),
            Tensor::replicated(128, 129),
            Tensor::vector(512),
        ];
        let weights = Weights { what: "", tensors };
        assert_eq!(weights.scales(Some([128, 128])), Count { divided: 3 * 5 * 56, replicated: 2 });
        assert_eq!(weights.scales(None), Count { divided: 3, replicated: 1 });
    }
}
