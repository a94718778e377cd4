//! Random programs over tensors that share memory, by tickets and in place, against a model of who shares what with whom.

use super::child::ipc;
use super::{Folder, LONG, host, ndarray};
use bridge_core::{Access, ErrorKind, Options, Order, Permutation, Result, copy_into, transfer};
use bridge_fuzz::{Random, number};
use bridge_ipc::{Exporter, IpcTensor, Limits, Message, Writing, open};
use bridge_ndarray::HostArray;
use ndarray::{ArrayD, Axis};
use std::cell::RefCell;
use std::rc::Rc;

#[derive(Clone)]
enum Tensor {
    Array(HostArray),
    Opened(IpcTensor),
}

/// Runs code with a tensor and the adapter for it.
macro_rules! with {
    ($tensor:expr, |$from:ident, $inner:ident| $code:expr) => {
        match $tensor {
            Tensor::Array($inner) => {
                let $from = &ndarray();
                $code
            }
            Tensor::Opened($inner) => {
                let $from = &ipc();
                $code
            }
        }
    };
}

impl Tensor {
    fn values(&self) -> ArrayD<i32> {
        let seen = with!(self, |from, tensor| transfer(from, &ndarray(), tensor, &host(), &Options::in_place()));
        seen.unwrap().0.to_array().unwrap()
    }

    fn is_read_only(&self) -> bool {
        with!(self, |_from, tensor| tensor.access()) == Access::ReadOnly
    }

    /// Takes it to an array, or by a ticket. Returns whether the memory is another one then.
    fn converted(&self, exporter: &Exporter, writing: Option<Writing>, options: &Options) -> Result<(Self, bool)> {
        with!(self, |from, tensor| match writing {
            None => {
                let (array, done) = transfer(from, &ndarray(), tensor, &host(), options)?;
                Ok((Self::Array(array), done.copied_by.is_some()))
            }
            Some(_) => {
                let message =
                    Message::of(&[(from, tensor)], writing, &host(), options).map_err(|failed| failed.error)?;
                let copied = message.transfers()[0].copied_by.is_some();
                let ticket = message.share(exporter, LONG, None)?;
                let opened = open(&ticket)?.tensors.remove(0);
                exporter.end(&ticket)?;
                Ok((Self::Opened(opened), copied))
            }
        })
    }
}

/// What a tensor holds: cells, which other tensors may have as well, and the number of the cell of each element.
#[derive(Clone)]
struct Model {
    cells: Rc<RefCell<Vec<i32>>>,
    elements: ArrayD<usize>,
}

impl Model {
    fn values(&self) -> ArrayD<i32> {
        self.elements.map(|cell| self.cells.borrow()[*cell])
    }

    fn copied(&self) -> Self {
        let cells: Vec<_> = self.values().iter().copied().collect();
        let elements = ArrayD::from_shape_vec(self.elements.shape(), (0..cells.len()).collect()).unwrap();
        Self { cells: Rc::new(RefCell::new(cells)), elements }
    }

    fn permuted(&self, axes: &[usize]) -> Self {
        Self { cells: Rc::clone(&self.cells), elements: self.elements.clone().permuted_axes(axes) }
    }
}

/// One program: tensors, and what they must hold.
struct Program<'a> {
    random: Random,
    exporter: &'a Exporter,
    live: Vec<(Tensor, Model)>,
}

impl Program<'_> {
    /// Makes an array whose axes are permuted and reversed.
    fn make(&mut self) {
        let shape: Vec<_> = (0..self.random.below(4)).map(|_| self.random.below(40).min(4)).collect();
        let numel = shape.iter().product();
        let cells: Vec<i32> = (0..numel).map(|_| self.random.bits() as i32).collect();
        let mut array = ArrayD::from_shape_vec(shape.clone(), cells.clone()).unwrap();
        let mut elements = ArrayD::from_shape_vec(shape, (0..numel).collect()).unwrap();
        let axes = self.axes(array.ndim());
        for axis in (0..array.ndim()).filter(|axis| axis % 2 == self.random.below(3)).collect::<Vec<_>>() {
            array.invert_axis(Axis(axis));
            elements.invert_axis(Axis(axis));
        }
        let model = Model { cells: Rc::new(RefCell::new(cells)), elements };
        self.live.push((Tensor::Array(array.permuted_axes(&axes[..]).into()), model.permuted(&axes)));
    }

    fn axes(&mut self, ndim: usize) -> Vec<usize> {
        let mut axes: Vec<_> = (0..ndim).collect();
        (1..ndim).for_each(|last| axes.swap(last, self.random.below(last + 1)));
        axes
    }

    fn one(&mut self) -> (Tensor, Model) {
        let at = self.random.below(self.live.len());
        self.live[at].clone()
    }

    fn convert(&mut self) {
        let (tensor, model) = self.one();
        let axes = self.axes(model.elements.ndim());
        let permutation = Permutation::new(&axes.iter().map(|axis| *axis as i64).collect::<Vec<_>>()).unwrap();
        let copy = [None, Some(true), Some(false)][self.random.below(3)];
        let order = [None, Some(Order::RowMajor), Some(Order::ColumnMajor)][self.random.below(3)];
        let writing = [None, Some(Writing::Shared), Some(Writing::Private), Some(Writing::Never)];
        let options = Options::default().with_permute(permutation).with_copy(copy).with_order(order);
        let writing = writing[self.random.below(4)];
        match tensor.converted(self.exporter, writing, &options) {
            // Private memory begins with the other process's elements, and keeps its own writes.
            Ok((converted, copied)) if copied || writing == Some(Writing::Private) => {
                self.live.push((converted, model.permuted(&axes).copied()));
            }
            Ok((converted, _)) => self.live.push((converted, model.permuted(&axes))),
            Err(error) => assert!(copy == Some(false) && error.kind() == ErrorKind::CopyNeeded, "{error}"),
        }
    }

    /// Copies one tensor into another, unless the error says why not.
    fn copy(&mut self) {
        let ((source, from), (target, to)) = (self.one(), self.one());
        let done = with!(&source, |a, x| with!(&target, |b, y| copy_into(a, b, x, y, &host()))).map(drop);
        let mut values = from.values();
        // As in `numpy.copyto`.
        while values.ndim() > to.elements.ndim() && values.shape()[0] == 1 {
            values = values.index_axis_move(Axis(0), 0);
        }
        match (done, values.broadcast(to.elements.shape())) {
            (Ok(()), wide) => to.elements.iter().zip(&wide.expect("the shapes fit")).for_each(|(cell, value)| {
                to.cells.borrow_mut()[*cell] = *value;
            }),
            (Err(error), _) if error.kind() == ErrorKind::ReadOnly => assert!(target.is_read_only(), "{error}"),
            (Err(error), wide) => assert!(wide.is_none() || Rc::ptr_eq(&from.cells, &to.cells), "{error}"),
        }
    }

    fn step(&mut self) {
        match self.random.below(8) {
            _ if self.live.is_empty() => self.make(),
            0 => self.make(),
            1 | 2 => self.copy(),
            3 => drop(self.live.swap_remove(self.random.below(self.live.len()))),
            _ => self.convert(),
        }
        self.live.truncate(16);
        for (tensor, model) in &self.live {
            assert_eq!(tensor.values(), model.values());
        }
    }
}

#[test]
fn random_programs_agree_with_their_models() {
    let folder = Folder::new();
    let exporter = folder.exporter(Limits::default());
    for seed in 0..number("TRUEBRIDGE_PROGRAMS", 150) {
        println!("seed {seed}");
        let mut program = Program { random: Random(seed), exporter: &exporter, live: Vec::new() };
        (0..40).for_each(|_| program.step());
    }
}
