//! Decoding of E4M3 by every instruction set.

use mlakit_cpu::e4m3;

use crate::common::kernels;

#[test]
fn every_code_at_every_place_of_a_vector() {
    for kernels in kernels() {
        for count in [0, 1, 15, 16, 17, 63, 64, 65, 576] {
            for shift in 0..=255_u8 {
                let codes: Vec<u8> = (0..count).map(|i| (i as u8).wrapping_add(shift)).collect();
                let mut got = vec![0xaaaa_u16; count + 1];
                // SAFETY: both ranges hold `count` elements.
                unsafe { kernels.decode_e4m3(codes.as_ptr(), got.as_mut_ptr(), count) };
                for i in 0..count {
                    let expected = e4m3::decode(codes[i]);
                    assert_eq!(got[i], expected, "{} code {:#x}", kernels.isa(), codes[i]);
                }
                assert_eq!(got[count], 0xaaaa, "{}: wrote past the end", kernels.isa());
            }
        }
    }
}
