//! The examples run. They are numbered in the order in which to read them.
#![cfg(all(feature = "dlpack", feature = "ndarray"))]

macro_rules! examples {
    ($($name:ident = $path:literal;)*) => {
        $(
            #[path = $path]
            mod $name;

            #[test]
            fn $name() {
                $name::main().expect("the example runs");
            }
        )*

        #[test]
        fn every_example_is_tested() {
            let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/examples");
            let files = std::fs::read_dir(folder).expect("the folder is there").count();
            assert_eq!(files, [$($path),*].len());
        }
    };
}

examples! {
    in_place = "../examples/1_in_place.rs";
    plan = "../examples/2_plan.rs";
    layouts = "../examples/3_layouts.rs";
    many = "../examples/4_many.rs";
    lifetimes = "../examples/5_lifetimes.rs";
}
