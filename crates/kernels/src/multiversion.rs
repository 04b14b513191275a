//! One source, several instruction sets.

/// Defines a function that runs `$body` compiled for the [`Isa`](super::Isa) given first.
///
/// `$body` is an `#[inline(always)]` function, generic over `const FMA: bool`, of plain loops that the compiler
/// turns into vector code.
macro_rules! multiversion {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name(isa: $crate::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx2,fma")]
                fn avx512($($arg: $ty),*) $(-> $ret)? { $body::<true>($($arg),*) }
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $ty),*) $(-> $ret)? { $body::<true>($($arg),*) }
                match isa.level() {
                    // SAFETY: to hold it proves that it was detected, with AVX2 and FMA.
                    $crate::Level::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::Level::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::Level::Portable => {}
                }
            }
            let _ = isa;
            // Every 64-bit ARM has fused multiply-add; there is no other target to speak of that surely has.
            $body::<{ cfg!(target_arch = "aarch64") }>($($arg),*)
        }
    };
}
pub(crate) use multiversion;
