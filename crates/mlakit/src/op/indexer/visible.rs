//! Which pools a row sees: the rule that every device follows.

/// The pools whose last token a row at `last_position` sees, of `kv_len` complete ones; and whether the position was in bounds. A
/// negative position is that of a padding row, which sees none.
pub fn pools_visible(last_position: i64, pool_size: usize, kv_len: usize) -> (usize, bool) {
    let Ok(last) = u64::try_from(last_position) else { return (0, true) };
    let complete = (last + 1) / pool_size as u64;
    match usize::try_from(complete) {
        Ok(pools) if pools <= kv_len => (pools, true),
        _ => (kv_len, false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_is_seen_from_its_last_token_on() {
        assert_eq!([2, 3, 4, 7, 8].map(|p| pools_visible(p, 4, 9).0), [0, 1, 1, 2, 2]);
        assert_eq!(pools_visible(-1, 4, 9), (0, true));
        assert_eq!(pools_visible(i64::MIN, 4, 9), (0, true));
        assert_eq!(pools_visible(39, 4, 9), (9, false));
        assert_eq!(pools_visible(i64::MAX, 4, 9), (9, false));
    }
}
