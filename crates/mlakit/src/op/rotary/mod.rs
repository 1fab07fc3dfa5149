//! `rotary`: rotary position embedding of a part of each head.
//!
//! `R` rows of `heads` heads; `width` elements of each are rotated, as `width / 2` pairs. Pair `j`
//! of a row at position `p` turns by `angle = f32(p) * inv_freq[j]`, a product rounded to F32: with
//! `c = attention_factor * cos(angle)` and `s = attention_factor * sin(angle)`, `(a, b)` becomes
//! `(a c - b s, b c + a s)`. Style `pair` rotates `(x[2j], x[2j + 1])`, style `half` rotates
//! `(x[j], x[j + width / 2])`; both write where they read. One rounding to BF16 at the end. Where
//! a head has elements before or behind the rotated ones (`before`, `after`), these are copied.
//!
//! Any I32 is a position: a negative one turns backwards, a huge one needs a cosine that is right
//! for huge angles.
//!
//! Sources: "RoFormer" (arXiv 2104.09864), equation 34, for `pair`; `half` is the same with another
//! order of elements, as Hugging Face checkpoints of the Llama family store them;
//! `attention_factor` is that of "YaRN" (arXiv 2309.00071), section 3.4.

mod bind;
mod oracle;
mod plan;
mod spec;

pub use bind::{RotaryArgs, RotaryRegions};
pub use oracle::{RotaryCase, oracle};
pub use plan::Rotary;
pub use spec::{RotaryFields, RotarySpec, RotaryStyle};
