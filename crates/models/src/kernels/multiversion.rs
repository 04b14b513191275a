//! One source, several instruction sets.

/// Defines a function that runs `$body` compiled for the [`Isa`](super::Isa) given first.
///
/// `$body` is an `#[inline(always)]` function, generic over `const FMA: bool`, of plain loops that the compiler
/// turns into vector code. `Isa::Portable` still means AVX2 with fused multiply-add where the CPU has them.
macro_rules! multiversion {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name(isa: $crate::kernels::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx2,fma")]
                fn avx512($($arg: $ty),*) $(-> $ret)? { $body::<true>($($arg),*) }
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $ty),*) $(-> $ret)? { $body::<true>($($arg),*) }
                if isa == $crate::kernels::Isa::Avx512 {
                    // SAFETY: callers have it from `Isa::detect`, which found AVX-512F; no CPU has that without
                    // AVX2 and FMA.
                    return unsafe { avx512($($arg),*) };
                }
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    // SAFETY: just detected.
                    return unsafe { avx2($($arg),*) };
                }
            }
            let _ = isa;
            // Every 64-bit ARM has fused multiply-add; there is no other target to speak of that surely has.
            $body::<{ cfg!(target_arch = "aarch64") }>($($arg),*)
        }
    };
}
pub(crate) use multiversion;
